"""Files on disk: index, rank files, boxes, locks, and who writes what."""
