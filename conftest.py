"""What all tests share: bytecode for the many processes that they start, and patience.

Loading torch and what belongs to it takes three times as long from source. Where Python was
told to leave no bytecode beside the sources, it goes into pytest's own folder.
"""

import os
import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Keep bytecode in pytest's cache if nowhere else; let examples take their time."""
    cache = getattr(config, "cache", None)
    if sys.dont_write_bytecode and cache is not None:
        folder = str(cache.mkdir("bytecode"))
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder
        sys.dont_write_bytecode = False
    from hypothesis import HealthCheck, settings  # Now that its bytecode is kept.

    # On a busy host a second may draw few examples: no test hangs on how many.
    settings.register_profile("suite", suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")
