"""The quickstart: trains a GPT on a book."""
