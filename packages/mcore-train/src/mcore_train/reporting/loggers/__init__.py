"""Where numbers of a run go beside its own files: one file for each service."""
