"""Errors that end a command with one line: failed engines and texts without a next token."""


class EngineError(RuntimeError):
    """An engine failed, on this rank or another."""


class StructureError(RuntimeError):
    """No token of the vocabulary continues a text within its structure."""
