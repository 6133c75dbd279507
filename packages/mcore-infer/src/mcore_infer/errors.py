"""Failures that end a command in one line: neither bad input nor a fault of the program."""


class EngineError(RuntimeError):
    """An engine failed, on this rank or another."""


class StructureError(RuntimeError):
    """No token goes on with the structure that a text is held to."""
