"""Saves and resumes runs."""
