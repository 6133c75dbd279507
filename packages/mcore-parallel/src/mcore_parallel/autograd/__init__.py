"""Autograd functions, main gradients of weights, and recomputation."""
