"""Models with a recurrent state: Mamba and hybrids."""
