"""Megatron's names, layouts, buckets and optimizer state."""
