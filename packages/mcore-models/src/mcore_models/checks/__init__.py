"""Whether a model fits a layout, and a batch its model."""
