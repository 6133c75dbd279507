"""Which bytes of which file made a sample."""
