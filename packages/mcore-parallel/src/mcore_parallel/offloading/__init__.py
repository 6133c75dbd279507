"""Offloading of optimizer state and activations to host memory."""
