"""What a run reads: datasets, batch sizes, and the micro-batches of one rank."""
