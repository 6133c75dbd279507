"""Scores of attention that stay bounded by scaling the weights of queries and keys."""
