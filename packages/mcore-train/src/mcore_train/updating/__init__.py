"""Updates of weights: optimizers, learning rates, and the scale of the loss."""
