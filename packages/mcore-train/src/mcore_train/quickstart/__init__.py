"""The first tour: a GPT that learns a book."""
