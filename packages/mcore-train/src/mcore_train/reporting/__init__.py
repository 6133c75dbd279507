"""Logs, metrics, hardware facts and schedule pictures."""
