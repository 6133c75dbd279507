"""Errors that end a command with one line: a failed engine, and a text without next token."""


class EngineError(RuntimeError):
    """Raised after an engine has failed, on this rank or another."""


class StructureError(RuntimeError):
    """Raised if no token of the vocabulary continues a text within its structure."""
