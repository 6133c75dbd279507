"""Triton kernels of decoding: attention to pages, and GEMMs of few rows."""
