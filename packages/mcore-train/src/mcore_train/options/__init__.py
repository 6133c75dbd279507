"""The command line, recipes and what conflicts."""
