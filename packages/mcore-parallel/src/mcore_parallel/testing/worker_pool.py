"""The processes behind ``testing``: forked from others that have torch loaded.

A ``Pool`` keeps gloo ranks for the whole test run. Each call makes a fresh world of the first
N of them. When a rank fails, the others get a moment to answer too; who does not is ended,
so no rank is left waiting for a dead peer, and a rank that answers is used again. A
``ForkServer`` forks them.

``run_forked`` runs a command once, as its own ``__main__``.
"""

import gc
import importlib
import importlib.util
import multiprocessing as mp
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import ModuleType
from typing import Any

CHECKED_PACKAGES = ("mcore_parallel", "mcore_moe", "mcore_models", "mcore_ckpt", "mcore_infer")
# Third parties only: our own packages must be imported under the shape hook. torch loads the
# compiler and sympy behind its back, in backward and in optimizers, for 5 s a process; every
# child of a test run loads what started it: pytest.
PRELOADED = (
    *("numpy", "torch", "torch.distributed", "torch._dynamo"),
    *("rich.progress", "pytest"),
)
OUR_PACKAGES = (*CHECKED_PACKAGES, "mcore_data", "mcore_train")
GRACE_S = 0.5
"""How long ranks may still answer after one has failed."""
LEAVE_S = 30.0
"""How long a rank that has answered may take to leave a failed world."""


def warm_context() -> ForkServerContext:
    """Return the context whose processes are forked from the warm server."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class ForkServer:
    """A process with our packages imported, which forks ranks: each is ready at once.

    It imports those of our rooms that this process has; under the shape hook that is seconds.

    Args:
        check_shapes: check jaxtyping annotations in the ranks.

    Raises:
        RuntimeError: if a room cannot be imported there, with the traceback.
    """

    def __init__(self, check_shapes: bool) -> None:
        self._control, there = mp.Pipe()
        rooms = [name for name in sys.modules if name.partition(".")[0] in OUR_PACKAGES]
        self._process = warm_context().Process(
            target=_serve_forks, args=(there, check_shapes, list(sys.path), rooms), daemon=True
        )
        with there:
            self._process.start()
        if trouble := self._control.recv():
            raise RuntimeError(f"ranks cannot start:\n{trouble}")

    def fork(self) -> "Member":
        """Start a rank, which sees the ``sys.path`` of now."""
        here, there = mp.Pipe()
        with there:
            self._control.send(list(sys.path))
            send_handle(self._control, there.fileno(), self._process.pid)
            return Member(self._control.recv(), here)

    def end(self, member: "Member") -> None:
        """Kill a rank, if it still lives, and wait for its end."""
        member.pipe.close()
        self._control.send(member.pid)
        self._control.recv()

    def stop(self) -> None:
        """End the process; ranks that it forked end once their pipes are closed."""
        self._control.close()
        self._process.join()


@dataclass(frozen=True, slots=True)
class Member:
    """A rank of a pool: its process, and the pipe to it."""

    pid: int
    pipe: Connection

    def is_alive(self) -> bool:
        """Say whether it can take a task; to be asked when none is running."""
        return not (self.pipe.closed or self.pipe.poll())


class Pool:
    """Warm ranks and the pipes to them.

    Args:
        check_shapes: check jaxtyping annotations in the ranks, where beartype is installed.
    """

    def __init__(self, check_shapes: bool) -> None:
        self.check_shapes = check_shapes
        self.fork_server: ForkServer | None = None
        self.members: list[Member] = []

    def run(
        self, function: Callable[..., Any], world_size: int, arguments: tuple, timeout_s: float
    ) -> list[Any]:
        """Run a function on every rank of a fresh world; see ``testing.run_ranks``."""
        address = address_of(function)
        self._fill(world_size)
        folder = tempfile.mkdtemp(prefix="ranks")
        # On their own: a child must know the test's file before it can read its classes.
        packed = pickle.dumps(arguments)
        task = (address, world_size, os.path.join(folder, "store"), packed)
        try:
            for rank in range(world_size):
                self.members[rank].pipe.send_bytes(pickle.dumps((rank, *task)))
            return self._collect(world_size, timeout_s)
        except RuntimeError:
            self._settle(world_size)
            raise
        except BaseException:
            self.stop()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _fill(self, size: int) -> None:
        """Start ranks that are not there, or not any more."""
        self.fork_server = self.fork_server or ForkServer(self.check_shapes)
        for rank in range(size):
            if rank < len(self.members) and self.members[rank].is_alive():
                continue
            self.members[rank : rank + 1] = [self.fork_server.fork()]

    def _collect(self, world_size: int, timeout_s: float) -> list[Any]:
        waiting = {self.members[rank].pipe: rank for rank in range(world_size)}
        results: list[Any] = [None] * world_size
        deadline = time.monotonic() + timeout_s
        failed = ""
        while waiting:
            ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    failure, results[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    failed = failed or f"rank {rank} of {world_size} died"
                else:
                    if failure:
                        failed = failed or f"rank {rank} of {world_size} failed:\n{failure}"
            if not failed and not ready:
                failed = (
                    f"ranks {sorted(waiting.values())} of {world_size} gave no answer in "
                    f"{timeout_s} s"
                )
            if failed:
                if not ready:
                    break
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in waiting.values():
            self._end(rank)
        if failed:
            raise RuntimeError(failed)
        return results

    def _settle(self, world_size: int) -> None:
        """Let ranks that answered leave the failed world; end those that cannot."""
        living = [rank for rank in range(world_size) if self.members[rank].is_alive()]
        for rank in living:
            pipe = self.members[rank].pipe
            try:
                pipe.send_bytes(pickle.dumps(None))
                has_left = pipe.poll(LEAVE_S) and pickle.loads(pipe.recv_bytes()) == "left"
            except (EOFError, OSError):
                has_left = False
            if not has_left:
                self._end(rank)

    def _end(self, rank: int) -> None:
        assert self.fork_server is not None
        self.fork_server.end(self.members[rank])

    def stop(self) -> None:
        """End all ranks."""
        if self.fork_server is not None:
            for rank in range(len(self.members)):
                self._end(rank)
            self.fork_server.stop()
        self.fork_server, self.members = None, []


def run_forked(
    module: str,
    words: Sequence[str],
    env: Mapping[str, str] | None,
    cwd: str | Path | None,
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """Run a module as ``__main__`` in a forked process; see ``testing.run_command``."""
    command = [sys.executable, "-m", module, *words]
    with tempfile.TemporaryDirectory(prefix="command") as folder:
        streams = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        place = (dict(os.environ if env is None else env), str(cwd or os.getcwd()), streams)
        process = warm_context().Process(
            target=_run_main, args=(module, list(words), list(sys.path), *place)
        )
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout_s)
        out, err = (Path(stream).read_text(errors="replace") for stream in streams)
        return subprocess.CompletedProcess(command, process.exitcode, out, err)


def _run_main(
    module: str,
    words: list[str],
    path: list[str],
    env: dict[str, str],
    cwd: str,
    streams: list[str],
) -> None:
    """Run in a child: become the command, to its exit code."""
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

    # As in a process that was started: processes of its own are forked, and random numbers
    # begin elsewhere than in all others.
    mp.set_start_method(None, force=True)
    torch.set_num_threads(1)
    torch.seed()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def address_of(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Say where a function is found by another process: module, file, name.

    Raises:
        ValueError: if it is no module-level function of a file.
    """
    path = getattr(sys.modules.get(function.__module__), "__file__", None)
    if path is None or "<locals>" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} must be a module-level function of a file")
    return function.__module__, path, function.__qualname__


def _serve_forks(
    control: Connection, check_shapes: bool, path: list[str], rooms: list[str]
) -> None:
    """Run in a nest: fork a rank for each path, end one for each process id, until closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent's, who ends all.
    sys.path[:] = path
    warnings.simplefilter("error")
    # Seen on torch 2.11 with gloo: noise about the default device that no test can act on.
    warnings.filterwarnings("ignore", module="torch.*")
    if check_shapes and importlib.util.find_spec("beartype") is not None:
        from jaxtyping import install_import_hook

        install_import_hook(list(CHECKED_PACKAGES), "beartype.beartype")
    try:
        for room in rooms:
            importlib.import_module(room)
    except BaseException:  # noqa: BLE001 - the parent raises it, with this traceback
        control.send(traceback.format_exc())
        return
    control.send("")
    gc.freeze()  # What is here is here to stay: no rank looks through it again.
    living: set[int] = set()
    while True:
        try:
            asked: list[str] | int = control.recv()
        except (EOFError, OSError):
            return
        if isinstance(asked, int):
            if asked in living:
                os.kill(asked, signal.SIGKILL)
                os.waitpid(asked, 0)
                living.remove(asked)
            control.send(None)
            continue
        pipe = Connection(recv_handle(control))
        pid = os.fork()
        if pid == 0:
            try:
                control.close()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                sys.path[:] = asked
                _serve(pipe)
            finally:
                os._exit(0)
        pipe.close()
        living.add(pid)
        control.send(pid)


def _serve(pipe: Connection) -> None:
    """Run in a rank: answer tasks until the pipe closes."""
    import torch
    import torch.distributed as dist

    # Here and not in the nest: threads of autograd end a process that was forked after it.
    torch.set_num_threads(1)
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        if task is None:  # A peer failed, and all that are left know it.
            if dist.is_initialized():
                dist.destroy_process_group()
            pipe.send_bytes(pickle.dumps("left"))
            gc.collect()
            continue
        rank, address, world_size, store, arguments = task
        try:
            function = load_function(address)
            _start_afresh()
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
            )
            # Who is connected to all must not leave before the others are so too.
            dist.barrier(group=dist.group.WORLD)
            answer = pickle.dumps((None, function(*pickle.loads(arguments))))
            dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 - the parent raises it, with this traceback
            # The group stays until the parent says so: closing it would fail the peers, whose
            # complaint about a lost connection might come first.
            answer = pickle.dumps((traceback.format_exc(), None))
        pipe.send_bytes(answer)
        gc.collect()  # Models and groups, which are threads that poll for ever.


def _start_afresh() -> None:
    """Forget what earlier tests left in this process: random state and compiled code."""
    import torch

    torch.manual_seed(0)
    torch.compiler.reset()


def load_function(address: tuple[str, str, str]) -> Callable[..., Any]:
    """Return the function that ``address_of`` named in another process."""
    module_name, file, name = address
    if module_name.startswith("mcore_"):
        module = importlib.import_module(module_name)
        return getattr(module, name)
    # A test file is no importable module under pytest's importlib mode: load it by path, under
    # the name that it has there, so that its classes travel both ways.
    module = sys.modules.get(module_name)
    if module is None:
        # Unpickling a class of ``a.b.c`` asks for ``a`` first; its neighbours may be imported.
        parents = module_name.split(".")[:-1]
        for count in range(1, len(parents) + 1):
            parent = ModuleType(".".join(parents[:count]))
            parent.__path__ = [str(Path(file).parents[len(parents) - count])]
            sys.modules.setdefault(parent.__name__, parent)
        sys.path.insert(0, str(Path(file).parent))
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    function: Any = module
    for attribute in name.split("."):
        function = getattr(function, attribute)
    return function
