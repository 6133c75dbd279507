"""Choosing the experts of each token, balancing their load, and counting choices."""
