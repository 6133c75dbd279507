"""Traces a sample back to the documents and input files that it was made from."""
