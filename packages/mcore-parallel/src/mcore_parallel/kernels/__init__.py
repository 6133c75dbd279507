"""Triton kernels; the module that calls one holds its reference in plain torch."""
