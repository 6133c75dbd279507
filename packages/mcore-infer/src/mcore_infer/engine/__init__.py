"""The engine: requests of any length are batched, step by step, over pages of memory."""
