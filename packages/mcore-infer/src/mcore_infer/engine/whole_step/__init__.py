"""A decoding step of all layers as one CUDA kernel."""
