"""What all tests share: checked shapes, one thread a process, kept bytecode, and patience.

Tests fork, and a fork of a process whose torch computes on several threads waits for ever in
its first parallel loop. Loading torch and what belongs to it takes three times as long from
source: where Python writes no bytecode beside the sources, it goes into pytest's own folder.
"""

import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator

import pytest
from shape_checks import install_shape_checks

install_shape_checks()  # Before any conftest below imports what is checked.

# Folders that one process runs: their tests share trainings, or parsed sources.
SHARED = ("tests/parity", "tests/house")
# Of few tests that take long. xdist would hand out files of few tests last, and one
# process would end long after the others.
LONG = (
    *SHARED,
    "packages/mcore-models/tests/kernels/test_kernels_interpreted.py",
    "tests/e2e/test_flow.py",
    "packages/mcore-moe/tests/dispatch/test_symmetric.py",
    "tests/alacarte/test_wrappers.py",
    "packages/mcore-infer/tests/server/test_worker.py",
    "packages/mcore-data/tests/preprocessing/test_crash.py",
    "packages/mcore-data/tests/preprocessing/test_on_the_fly.py",
    "packages/mcore-train/tests/test_families.py",
)
# The collector's thresholds: by default it runs every 700 objects, which took three quarters of
# the time to parse our sources.
RARELY = (20_000, 20, 20)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def pytest_configure(config: pytest.Config) -> None:
    """Keep to one thread, and bytecode in pytest's cache if nowhere else; set patience."""
    os.environ.update(ONE_THREAD | os.environ)  # Before torch is loaded, which reads it then.
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


def pytest_collection() -> None:
    """Leave the collector alone while half a million objects come that stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Set them aside: it never looks at them again. Ranks of tests are forked from here."""
    import warm_ranks  # Now that the shape hook is there.

    if "PYTEST_XDIST_WORKER" in os.environ:  # Its many tests load them, and each rank's server.
        for name in warm_ranks.PRELOADED:
            importlib.import_module(name)
    warm_ranks.set_aside()
    gc.enable()
    gc.set_threshold(*RARELY)
    warm_ranks.fork_server_of_ranks()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Hand out whole files and shared folders under ``pytest -n``; the long ones first."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = [folder for folder in SHARED if f"{folder}/" in nodeid]
            return shared[0] if shared else super()._split_scope(nodeid)

        def _assign_work_unit(self, node: object) -> None:
            for scope in LONG:
                if scope in self.workqueue:
                    self.workqueue.move_to_end(scope, last=False)
                    break
            super()._assign_work_unit(node)

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def no_log_handler_is_left() -> Iterator[None]:
    """Remove what a command that ran in this process logged to: a stream closed by now."""
    yield
    top = logging.getLogger()
    top.handlers[:] = [h for h in top.handlers if type(h).__module__.startswith("_pytest.")]
    top.setLevel(logging.WARNING)
    logging.getLogger("mcore_train").setLevel(logging.NOTSET)
