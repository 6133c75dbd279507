"""Datasets of samples over indexed tokens."""
