"""QK-clip: bounds attention scores by scaling the weights of queries and keys."""
