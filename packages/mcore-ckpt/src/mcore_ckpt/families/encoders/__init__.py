"""Encoders, alone or with a decoder."""
