"""Text over HTTP: one engine, its requests, and the two interfaces that clients know."""
