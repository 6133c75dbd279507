"""Triton kernels of decoding: paged attention, and GEMMs with few rows."""
