"""Commands in forked processes: as ``python -m``, without the seconds of its imports.

A command of ours is forked from a server that has our packages loaded (``warm_ranks``), any
other from one that has third parties loaded alone.
"""

import multiprocessing as mp
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

# Third parties only: our own packages must be imported under the shape hook. torch loads the
# compiler and sympy behind its back, in backward and in optimizers, for 5 s a process; every
# child of a test run loads what started it: pytest.
PRELOADED = (
    *("numpy", "torch", "torch.distributed", "torch._dynamo"),
    *("rich.progress", "pytest"),
)

Command = tuple[str, list[str], list[str], dict[str, str], str, list[str]]
"""Module, words, ``sys.path``, environment, folder, and files for the two streams."""


def warm_context() -> ForkServerContext:
    """Return the context whose processes are forked from the warm server."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def run_forked(
    module: str,
    words: Sequence[str],
    env: Mapping[str, str] | None,
    cwd: str | Path | None,
    timeout_s: float,
    run_warm: Callable[[Command, float], int | None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a module as ``__main__`` in a forked process; see ``warm_ranks.run_command``.

    Args:
        module: a package with a ``__main__``, or a module.
        words: arguments.
        env: environment; None means that of this process.
        cwd: folder to run in; None means this one.
        timeout_s: after which the command is ended.
        run_warm: ``ForkServer.run`` of a server that has our packages loaded; None: a process
            without them.
    """
    words_of_python = [sys.executable, "-m", module, *words]
    with tempfile.TemporaryDirectory(prefix="command") as folder:
        streams = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        place = (dict(os.environ if env is None else env), str(cwd or os.getcwd()), streams)
        command = (module, list(words), list(sys.path), *place)
        code = (run_warm or _run_in_new)(command, timeout_s)
        if code is None:
            raise subprocess.TimeoutExpired(words_of_python, timeout_s)
        out, err = (Path(stream).read_text(errors="replace") for stream in streams)
        return subprocess.CompletedProcess(words_of_python, code, out, err)


def _run_in_new(command: Command, timeout_s: float) -> int | None:
    """Run a command in a process that has third parties loaded alone."""
    process = warm_context().Process(target=_run_main, args=command)
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


def _run_main(
    module: str,
    words: list[str],
    path: list[str],
    env: dict[str, str],
    cwd: str,
    streams: list[str],
) -> None:
    """Run the command in a child process, which ends with the command's exit code."""
    for descriptor, stream in enumerate(streams, start=1):
        opened = os.open(stream, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = path
    sys.argv[:] = [module, *words]
    import torch

    # As in a process that was started: the default start method, and a random seed.
    mp.set_start_method(None, force=True)
    torch.set_num_threads(1)
    torch.seed()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def watch_command(pipe: Connection, filters: list, command: Command) -> None:
    """Run a command in a child; send its process id, and its exit code once it has ended.

    Args:
        pipe: to who waits for the command.
        filters: of warnings, as in a new process.
        command: what to run.
    """
    mp.current_process().daemon = False  # A command may have children.
    process = mp.get_context("fork").Process(target=_run_loaded, args=(pipe, filters, command))
    process.start()
    pipe.send(process.pid)
    process.join()
    pipe.send(process.exitcode)


def _run_loaded(pipe: Connection, filters: list, command: Command) -> None:
    pipe.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.filters[:] = filters  # pyrefly: ignore
    _run_main(*command)
