"""Triton kernels, each in one file with its reference in plain torch."""
