"""Text files to .bin/.idx, in parallel and restartable."""
