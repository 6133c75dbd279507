"""Diagnosis of failed runs by their logs, of GPU memory by snapshots, of hosts by checks."""
