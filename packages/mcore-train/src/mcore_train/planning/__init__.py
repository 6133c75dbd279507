"""Predict time and memory of training layouts, search them, and explain the ranking."""
