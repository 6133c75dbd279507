"""Quantized weights: made, judged, and multiplied with."""
