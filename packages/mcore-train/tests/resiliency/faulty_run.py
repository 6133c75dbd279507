"""A run in which rank 1 fails once, before a step; run by test_nvrx.py.

Usage: python faulty_run.py gpt FLAGS, with FAULT (raise, hang or none), FAULT_STEP and NOTE: a
file that keeps the fault from happening twice.
"""

import os
import sys
import time
from pathlib import Path

from mcore_train import loop
from mcore_train.cli import main

one_step = loop.one_step


def faulty_step(run, *arguments):
    kind, note = os.environ["FAULT"], Path(os.environ["NOTE"])
    is_due = run.progress.iteration == int(os.environ["FAULT_STEP"])
    if kind != "none" and is_due and run.ctx.global_rank == 1 and not note.exists():
        note.write_text(str(time.time()))
        if kind == "raise":
            raise RuntimeError("a fault of the test")
        while kind == "hang":
            time.sleep(0.1)
    return one_step(run, *arguments)


if __name__ == "__main__":
    print("process", os.getpid(), "of rank", os.environ["RANK"], flush=True)
    loop.one_step = faulty_step
    sys.exit(main(sys.argv[1:]))
