"""One rank of a world in which something goes wrong; run by test_watchdog.py.

Usage: python -m faulty_rank FAULT TIMEOUT_S, with torchrun's variables set, and FROZEN to a
file for the process id of who stands still. Rank 1 is the faulty one, or for some faults
rank 0, which holds the store; the others sum and wait.
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch

from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import ParallelConfig
from mcore_parallel.launch import launcher
from mcore_parallel.launch.watchdog import Watch
from mcore_parallel.mesh import ParallelContext


def main() -> None:
    fault, timeout_s = sys.argv[1], float(sys.argv[2])
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    minutes = timeout_s / 60
    launcher.initialize("cpu", minutes)
    ctx = ParallelContext.build(
        ParallelConfig(distributed_timeout_minutes=minutes), compare_calls=True
    )
    is_late = fault == "late step"
    with Watch.of_world(ctx.world.rank, ctx.world.size, minutes, end_on_hang=is_late) as watch:
        for _ in range(6 if is_late else 2):
            total(ctx)
            watch.step_ended()
        if ctx.global_rank == (0 if fault in OF_RANK_0 else 1):
            FAULTS[fault](ctx)
        total(ctx)
    launcher.shut_down()


def total(ctx: ParallelContext) -> None:
    all_reduce(torch.ones(4), ctx.dp)


def die(ctx: ParallelContext) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(ctx: ParallelContext) -> None:
    # Who runs the test ends it, once the others have ended by themselves.
    Path(os.environ["FROZEN"]).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def dream(ctx: ParallelContext) -> None:
    time.sleep(600)


def complain(ctx: ParallelContext) -> None:
    raise ValueError("sample 7 is empty")


def send_other_shape(ctx: ParallelContext) -> None:
    all_reduce(torch.ones(5), ctx.dp)


def nothing(ctx: ParallelContext) -> None:
    """Do as the others do."""


FAULTS = {
    "dies": die,
    "sleeps": dream,
    "late step": dream,
    "raises": complain,
    "shape": send_other_shape,
    "freezes": freeze,
    "none": nothing,
}
OF_RANK_0 = ("freezes",)

if __name__ == "__main__":
    main()
