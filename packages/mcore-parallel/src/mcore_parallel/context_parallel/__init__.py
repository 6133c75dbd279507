"""Sequences split over context ranks: zigzag split, ring and all-gather attention."""
