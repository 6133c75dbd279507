"""Triton kernels; the caller of each has a reference in plain torch. Imported on a GPU only."""
