"""Gradient buckets, gradient and parameter collectives, the distributed optimizer."""
