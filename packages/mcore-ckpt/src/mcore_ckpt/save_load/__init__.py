"""Saving and loading from a running program."""
