"""Command line, recipes, Megatron's flags, and checks of whole plans."""
