"""Triton kernels, each with a plain reference beside its caller; imported only on a GPU."""
