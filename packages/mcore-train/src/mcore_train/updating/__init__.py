"""What updates weights: optimizers, their rates, and the scale of the loss."""
