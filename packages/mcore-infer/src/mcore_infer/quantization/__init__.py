"""Quantized matrices: made, written to folders, read, and multiplied."""
