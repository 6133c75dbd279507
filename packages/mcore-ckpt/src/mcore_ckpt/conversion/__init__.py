"""Conversion between formats, resharding, inspection and proofs."""
