"""Bytecode is kept for the many processes that tests start.

Loading torch and what belongs to it takes three times as long from source. Where Python was
told to leave no bytecode beside the sources, it goes into pytest's own folder.
"""

import os
import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Let this process and those that it starts write bytecode into pytest's cache."""
    cache = getattr(config, "cache", None)
    if sys.dont_write_bytecode and cache is not None:
        folder = str(cache.mkdir("bytecode"))
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder
        sys.dont_write_bytecode = False
