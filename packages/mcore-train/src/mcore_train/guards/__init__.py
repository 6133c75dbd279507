"""Signals, NaN, replica and garbage-collection guards."""
