"""One text: its request, its structure, its tokens while they are written, their decoding."""
