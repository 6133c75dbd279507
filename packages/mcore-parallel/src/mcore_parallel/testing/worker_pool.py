"""The processes behind ``testing``: forked from others that have torch loaded.

A ``Pool`` keeps gloo ranks for the whole test run. Each call makes a new world of the first N
of them. If a rank fails, all ranks of that world are ended, so none waits for a dead peer, and
the next call forks new ones from the ``ForkServer``.

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

from mcore_parallel.testing.shape_checks import CHECKED_PACKAGES, install_shape_checks

# Third parties only: our own packages must be imported under the shape hook. torch loads the
# compiler and sympy behind its back, in backward and in optimizers, for 5 s a process; every
# child of a test run loads what started it: pytest.
PRELOADED = (
    *("numpy", "torch", "torch.distributed", "torch._dynamo"),
    *("rich.progress", "pytest"),
)
# What a first ``torch.compile`` loads, for 4 s a rank; starts no thread, so it may be forked.
# Beside a GPU it starts CUDA, which a forked process cannot use: there each rank loads it.
COMPILER = ("torch._dynamo.backends.debugging", "torch._inductor.lowering")
OUR_PACKAGES = (*CHECKED_PACKAGES, "mcore_data", "mcore_train")


def warm_context() -> ForkServerContext:
    """Return the context whose processes are forked from the warm server."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class ForkServer:
    """A process with our packages imported, which forks ranks without a start-up time.

    It imports the modules of our packages that this process has imported, which takes seconds
    under the shape hook, or what compiles if shapes are not checked and no GPU is there.

    Args:
        check_shapes: check jaxtyping annotations in the ranks.

    Raises:
        RuntimeError: if a module cannot be imported there, with the traceback.
    """

    def __init__(self, check_shapes: bool) -> None:
        import torch

        self._control, there = mp.Pipe()
        modules = [name for name in sys.modules if name.partition(".")[0] in OUR_PACKAGES]
        if not check_shapes and not torch.cuda.is_available():
            modules += COMPILER
        self._process = warm_context().Process(
            target=_serve_forks,
            args=(there, check_shapes, list(sys.path), modules),
            daemon=True,
        )
        with there:
            self._process.start()
        if trouble := self._control.recv():
            raise RuntimeError(f"ranks cannot start:\n{trouble}")

    def fork(self) -> "Member":
        """Start a rank with this process's present ``sys.path``."""
        here, there = mp.Pipe()
        with there:
            self._control.send(list(sys.path))
            send_handle(self._control, there.fileno(), self._process.pid)
            return Member(self._control.recv(), here)

    def end(self, member: "Member") -> None:
        """Kill a rank, if it is alive, and wait for its end."""
        member.pipe.close()
        self._control.send(member.pid)
        self._control.recv()

    def stop(self) -> None:
        """End the process; the ranks that it forked end once their pipes are closed."""
        self._control.close()
        self._process.join()


@dataclass(frozen=True, slots=True)
class Member:
    """A rank of a pool: its process, and the pipe to it."""

    pid: int
    pipe: Connection


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
        """Run a function on every rank of a new world; see ``testing.run_ranks``."""
        address = address_of(function)
        self.fork_server = self.fork_server or ForkServer(self.check_shapes)
        while len(self.members) < world_size:
            self.members.append(self.fork_server.fork())
        folder = tempfile.mkdtemp(prefix="ranks")
        # Pickled separately: a rank must load the test's file before it can read its classes.
        packed = pickle.dumps(arguments)
        task = (address, world_size, os.path.join(folder, "store"), packed)
        try:
            for rank in range(world_size):
                self.members[rank].pipe.send_bytes(pickle.dumps((rank, *task)))
            return self._collect(world_size, timeout_s)
        except BaseException:
            for member in self.members[:world_size]:
                self.fork_server.end(member)
            del self.members[:world_size]
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _collect(self, world_size: int, timeout_s: float) -> list[Any]:
        waiting = {self.members[rank].pipe: rank for rank in range(world_size)}
        results: list[Any] = [None] * world_size
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(
                    f"ranks {sorted(waiting.values())} of {world_size} gave no answer in "
                    f"{timeout_s} s"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    failure, results[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    raise RuntimeError(f"rank {rank} of {world_size} died") from None
                if failure:
                    raise RuntimeError(f"rank {rank} of {world_size} failed:\n{failure}")
        return results

    def stop(self) -> None:
        """End all ranks."""
        if self.fork_server is not None:
            for member in self.members:
                self.fork_server.end(member)
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


def address_of(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return how another process finds a function: module, file, name.

    Raises:
        ValueError: if it is no module-level function of a file.
    """
    path = getattr(sys.modules.get(function.__module__), "__file__", None)
    if path is None or "<locals>" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} must be a module-level function of a file")
    return function.__module__, path, function.__qualname__


def _serve_forks(
    control: Connection, check_shapes: bool, path: list[str], modules: list[str]
) -> None:
    """Run in the server: fork a rank for each path received, end one for each process id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends all processes.
    sys.path[:] = path
    warnings.simplefilter("error")
    # Seen on torch 2.11 with gloo: noise about the default device that no test can act on.
    warnings.filterwarnings("ignore", module="torch.*")
    if check_shapes and importlib.util.find_spec("beartype") is not None:
        install_shape_checks()
    try:
        for module in modules:
            importlib.import_module(module)
    except BaseException:  # noqa: BLE001 - the parent raises it, with this traceback
        control.send(traceback.format_exc())
        return
    control.send("")
    gc.freeze()  # No rank's collector scans these objects again.
    living: set[int] = set()
    while True:
        try:
            request: list[str] | int = control.recv()
        except (EOFError, OSError):
            return
        if isinstance(request, int):
            if request in living:
                os.kill(request, signal.SIGKILL)
                os.waitpid(request, 0)
                living.remove(request)
            control.send(None)
            continue
        pipe = Connection(recv_handle(control))
        pid = os.fork()
        if pid == 0:
            try:
                control.close()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                sys.path[:] = request
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

    # Not in the server: a process forked after autograd has started threads would crash.
    torch.set_num_threads(1)
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
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
            # No rank may leave before all are connected to each other.
            dist.barrier(group=dist.group.WORLD)
            answer = pickle.dumps((None, function(*pickle.loads(arguments))))
            dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 - the parent raises it, with this traceback
            # The group stays open until the parent ends this rank: closing it would fail the
            # peers, whose error about a lost connection might come first.
            answer = pickle.dumps((traceback.format_exc(), None))
        pipe.send_bytes(answer)
        gc.collect()  # Frees models, and groups with their polling threads.


def _start_afresh() -> None:
    """Forget what earlier tests left here: random state, compiled code, meshes of DTensors."""
    import torch

    from mcore_parallel.mesh import forget_meshes

    torch.manual_seed(0)
    torch.compiler.reset()
    forget_meshes()


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
        # Unpickling a class of ``a.b.c`` imports ``a`` first, and may import its neighbours.
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
