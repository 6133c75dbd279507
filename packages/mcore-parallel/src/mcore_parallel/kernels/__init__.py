"""Triton kernels; each has a reference in plain torch beside its caller."""
