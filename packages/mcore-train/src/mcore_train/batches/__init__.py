"""Datasets, batch sizes, and the micro-batches of one rank."""
