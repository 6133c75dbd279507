"""CUDA graphs: of a whole step, or of each layer."""
