"""Tokens to the ranks of their experts, sorted by expert, and the results back."""
