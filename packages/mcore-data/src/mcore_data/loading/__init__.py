"""Samplers and loaders, which make a rank's batches from a dataset."""
