"""From a dataset to batches on a rank."""
