"""Decoders whose layers have one MLP each."""
