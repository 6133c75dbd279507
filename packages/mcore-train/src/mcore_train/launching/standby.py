"""A standby: the ranks of a local job's next attempt, started early, with all modules imported.

Imports are most of a restart's time, and need neither the GPU nor the other ranks. A rank of a
standby waits after them, until the launcher's file says that its attempt begins.
"""

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from mcore_models.kernels import flash4_attention
from mcore_parallel.launch.launcher import prepare_kernel_packages
from mcore_train.launching.config import LAUNCHER, TURN

log = logging.getLogger(__name__)

POLL_S = 0.05


def wait_for_turn(*, uses_gpus: bool) -> bool:
    """Return once this rank's attempt begins; imports kernels' packages before.

    Args:
        uses_gpus: whether the rank trains on a GPU, for which kernels are imported.

    Returns:
        Whether the rank has waited: False outside of a standby.

    Raises:
        RuntimeError: if the launcher, or the process that started the rank, ends before.
    """
    turn = Path(os.environ.get(TURN, ""))
    if TURN not in os.environ or turn.exists():
        return False
    if uses_gpus and flash4_attention.is_installed():
        prepare_kernel_packages()  # the package reads the settings when it is imported
        with suppress(Exception):  # the kernel's trial reports what its package raises
            flash4_attention.load()
    log.info("standby: this rank has imported its modules and waits")
    # The agent that started this rank survives a killed launcher, so both are watched.
    parent, launcher = os.getppid(), Path("/proc", os.environ[LAUNCHER])
    while not turn.exists():
        if os.getppid() != parent or not launcher.exists():
            raise RuntimeError("the launcher of this standby is gone")
        time.sleep(POLL_S)
    return True
