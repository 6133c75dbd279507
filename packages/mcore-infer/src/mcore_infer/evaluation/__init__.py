"""Perplexity of texts, and zero-shot tasks."""
