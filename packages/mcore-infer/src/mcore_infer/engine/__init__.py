"""The decode loop: continuous batching of requests over a paged key/value cache."""
