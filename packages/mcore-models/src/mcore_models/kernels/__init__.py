"""Attention backends and Triton kernels, and which of them can run here."""
