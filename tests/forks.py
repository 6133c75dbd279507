"""Children that tests fork: they end within a bound, whatever threads their parent has.

A fork takes one thread along. Where torch has begun to compute on several, the child's first
parallel loop waits for ever for the others: ``fork`` therefore sets one thread in the child,
and ``conftest.py`` in the parent.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path


def fork(work: Callable[[], object]) -> int:
    """Begin work in a child process; return its process id."""
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        code = work() or 0
    except BaseException:  # noqa: BLE001 - the parent sees the code
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(child: int, limit_s: float = 60.0) -> int:
    """Wait for the end of a child, but not for ever; negative after a signal."""
    handle = os.pidfd_open(child)
    has_ended, _, _ = select.select([handle], [], [], limit_s)
    os.close(handle)
    if not has_ended:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert has_ended, f"the child did not end in {limit_s:.0f} s"
    return code


def kill(child: int) -> None:
    """End a child without notice."""
    os.kill(child, signal.SIGKILL)
    exit_code(child)


def run(
    main: Callable[[list[str]], int], *words: object, cwd: str | Path = "."
) -> subprocess.CompletedProcess[str]:
    """Run a command's ``main`` in a child, as a shell would: it costs no start of Python."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]

        def work() -> int:
            os.chdir(cwd)
            logging.getLogger().handlers.clear()
            for number, path in enumerate(streams, start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            with open(1, "w") as sys.stdout, open(2, "w") as sys.stderr:
                return main([str(word) for word in words])

        code = exit_code(fork(work))
        out, error = (path.read_text() for path in streams)
        return subprocess.CompletedProcess(words, code, out, error)
