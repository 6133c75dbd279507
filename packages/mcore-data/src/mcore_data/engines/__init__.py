"""Bulk encoding engines."""
