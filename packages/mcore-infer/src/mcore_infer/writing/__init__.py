"""One text: how its tokens are chosen, constrained, ended and turned into characters."""
