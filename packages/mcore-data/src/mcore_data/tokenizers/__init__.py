"""Tokenizers of every supported kind."""
