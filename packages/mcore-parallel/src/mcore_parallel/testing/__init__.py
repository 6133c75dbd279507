"""Ranks for tests, and layouts compared with one rank."""
