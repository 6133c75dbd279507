"""Which experts a token goes to, how they are kept equally busy, and what is counted of it."""
