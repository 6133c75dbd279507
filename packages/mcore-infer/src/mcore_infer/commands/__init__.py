"""The subcommands of ``mcore-infer``; none imports torch before it runs."""
