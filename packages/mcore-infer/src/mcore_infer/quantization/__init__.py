"""Quantization: rounds matrices, writes and reads quantized folders, multiplies codes."""
