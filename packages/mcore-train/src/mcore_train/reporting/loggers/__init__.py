"""Loggers that send the numbers of a run to other services, one file for each service."""
