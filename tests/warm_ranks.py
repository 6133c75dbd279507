"""Ranks and commands of tests, on processes that have torch loaded.

Starting Python with torch costs seconds, a world of ranks 6 to 40 s on two cores. So
``run_ranks`` uses one ``Pool`` of gloo processes for the whole test run: each call makes a new
world of the first N of them. If a rank fails, all ranks of that world are ended, so none waits
for a dead peer, and the next call forks new ones from a ``ForkServer``: for ranks with checked
shapes pytest itself, as it is after collection. ``run_command`` forks a command from the server
of unchecked ranks instead of starting ``python -m``.
"""

import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from shape_checks import CHECKED_PACKAGES, install_shape_checks
from warm_commands import PRELOADED, Command, run_forked, warm_context, watch_command

from mcore_parallel.testing.ranks import collect_results, import_address, load_function

# What a first ``torch.compile`` loads, for 4 s a rank; starts no thread, so it may be forked.
# Beside a GPU it starts CUDA, which a forked process cannot use: there each rank loads it.
COMPILER = ("torch._dynamo.backends.debugging", "torch._inductor.lowering")
SLOW = ("torch.distributed.tensor", "torch.distributed.fsdp")
"""Modules of torch that some runs import, which take seconds: better once than in each rank."""
LOADING_S = 150.0
"""More than a task's own limit, for ranks that load its file and meet: on a crowded host that
takes longer than most tasks. With the usual limit less than pytest's, which shows no stacks."""
SHOW_STACKS = signal.SIGRTMIN + 7
"""On it a rank writes the stacks of its threads into a file: no test uses this signal."""
FREEZE = gc.freeze
OUR_PACKAGES = (*CHECKED_PACKAGES, "mcore_base", "mcore_data", "mcore_train")

# One pool for each value of check_shapes; it lives as long as the test run.
_POOLS: "dict[bool, Pool]" = {}


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_s: float = 120.0,
    check_shapes: bool = True,
) -> list[Any]:
    """Run ``function(*arguments)`` on every rank of a fresh gloo world.

    Inside, ``torch.distributed`` is initialised: read the rank from it, or build a
    ``ParallelContext``. The function is found by its file and name, so any module-level
    function of a test file works; arguments and results must pickle (tensors do). A rank has
    one thread. When one fails, those that wait for it are ended; the next call replaces them.
    A script calls it under ``if __name__ == "__main__"``, as its ranks read the script again.

    Args:
        function: a module-level function.
        world_size: ranks, 1 or more.
        arguments: passed to every rank.
        timeout_s: after which the ranks are ended, from when all have loaded the function.
        check_shapes: run with the jaxtyping annotations of these packages checked, where
            beartype is installed; false for compiled code.

    Returns:
        One result a rank, in rank order.

    Raises:
        RuntimeError: if a rank raises or dies (its traceback inside), or time runs out.
    """
    return _pool(check_shapes).run(function, world_size, arguments, timeout_s)


def _pool(check_shapes: bool) -> "Pool":
    if check_shapes not in _POOLS:
        _POOLS[check_shapes] = Pool(check_shapes)
    return _POOLS[check_shapes]


def set_aside() -> None:
    """Let the collector of this process and its forks never look again at what is alive.

    Nor after a training in it, whose end unfreezes all objects that there are: from then on
    each collection would take a third of a second, and copy the memory that forks share.
    """
    FREEZE()
    gc.freeze = gc.unfreeze = lambda: None


def fork_server_of_ranks() -> None:
    """Fork the server of checked ranks from this process, which has collected the tests.

    Its ranks have the test files and all that these import. Not beside a GPU: a process that
    is forked after CUDA was asked for cannot use it.
    """
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        return
    _pool(True).fork_server = ForkServer(True, mp.get_context("fork"))


def run_command(
    module: str,
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout_s: float = 240.0,
    is_ours: bool | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module words`` in a process that has torch loaded already.

    A command of ours finds what this process has imported of these packages loaded too.

    The module runs as ``__main__`` in a process of its own, with its own arguments, folder,
    environment and standard streams, and with one thread. Shapes are not checked.

    Args:
        module: a package with a ``__main__``, or a module.
        words: arguments, turned into strings.
        env: environment; None means that of this process.
        cwd: folder to run in; None means this one.
        timeout_s: after which the command is ended.
        is_ours: whether it uses these packages; None: whether it is one of them.

    Returns:
        Exit code and all that was written to standard output and standard error.

    Raises:
        subprocess.TimeoutExpired: if it takes longer.
    """
    is_ours = module in OUR_PACKAGES if is_ours is None else is_ours
    run = _pool(False).server().run if is_ours else None
    return run_forked(module, [str(word) for word in words], env, cwd, timeout_s, run)


class ForkServer:
    """A process with our packages imported, which forks ranks without a start-up time.

    Args:
        check_shapes: check jaxtyping annotations in the ranks.
        context: how the process is made: by "fork" it has what this process has loaded; by
            default it has third parties alone until ``load``.
    """

    def __init__(self, check_shapes: bool, context: BaseContext | None = None) -> None:
        self._control, there = mp.Pipe()
        self._asking = threading.Lock()
        self._check_shapes = check_shapes
        self._is_loaded = False
        is_forked = context is not None
        # A forked server has the shape hook already, and both ends of the pipe.
        inherited = self._control if is_forked else None
        self._process: Any = (context or warm_context()).Process(
            target=_serve_forks,
            args=(there, inherited, check_shapes and not is_forked),
            daemon=True,
        )
        with there:
            self._process.start()

    def load(self) -> None:
        """Import there, once, the modules of our packages that this process has imported.

        That takes seconds under the shape hook. If shapes are not checked and no GPU is there,
        also what compiles.

        Raises:
            RuntimeError: if a module cannot be imported there, with the traceback.
        """
        import torch

        with self._asking:
            if self._is_loaded:
                return
            modules = [name for name in sys.modules if name.partition(".")[0] in OUR_PACKAGES]
            modules = [name for name in modules if not name.endswith("__main__")]
            modules += [name for name in SLOW if name in sys.modules]
            if not self._check_shapes and not torch.cuda.is_available():
                modules += COMPILER
            self._control.send((list(sys.path), [*PRELOADED, *modules]))
            if trouble := self._control.recv():
                raise RuntimeError(f"ranks cannot start:\n{trouble}")
            self._is_loaded = True

    def fork(self) -> "Member":
        """Start a rank with this process's present ``sys.path``."""
        with self._asking:
            here = self._send(list(sys.path))
            return Member(self._control.recv(), here)

    def end(self, member: "Member") -> None:
        """Kill a rank, if it is alive, and wait for its end."""
        member.pipe.close()
        with self._asking:
            self._control.send(member.pid)
            self._control.recv()

    def run(self, command: "Command", timeout_s: float) -> int | None:
        """Run a command; return its exit code, or None if it took longer and was killed."""
        with self._asking:
            pipe = self._send(command)
        with pipe:
            pid = pipe.recv()
            if pipe.poll(timeout_s):
                return pipe.recv()
            os.kill(pid, signal.SIGKILL)
            pipe.recv()
            return None

    def _send(self, request: "list[str] | Command") -> Connection:
        here, there = mp.Pipe()
        with there:
            self._control.send(request)
            send_handle(self._control, there.fileno(), self._process.pid)
        return here

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
        self._starting = threading.Lock()
        self.members: list[Member] = []

    def run(
        self, function: Callable[..., Any], world_size: int, arguments: tuple, timeout_s: float
    ) -> list[Any]:
        """Run a function on every rank of a new world; see ``run_ranks``."""
        address = import_address(function)
        server = self.server()
        while len(self.members) < world_size:
            self.members.append(server.fork())
        folder = tempfile.mkdtemp(prefix="ranks")
        # Pickled separately: a rank must load the test's file before it can read its classes.
        packed = pickle.dumps(arguments)
        task = (address, world_size, os.path.join(folder, "store"), packed)
        try:
            for rank in range(world_size):
                self.members[rank].pipe.send_bytes(pickle.dumps((rank, *task)))
            self._collect(world_size, timeout_s + LOADING_S, folder)
            return self._collect(world_size, timeout_s, folder)
        except BaseException:
            for member in self.members[:world_size]:
                server.end(member)
            del self.members[:world_size]
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def server(self) -> ForkServer:
        """Return the process that forks the ranks, loaded when it is first needed."""
        with self._starting:
            server = self.fork_server or ForkServer(self.check_shapes)
            server.load()
            self.fork_server = server
        return server

    def _collect(self, world_size: int, timeout_s: float, folder: str) -> list[Any]:
        """Wait for one message of every rank: that it is ready, or its result."""
        pipes = {self.members[rank].pipe: rank for rank in range(world_size)}
        return collect_results(
            pipes, timeout_s, lambda: _stacks(self.members[:world_size], folder)
        )

    def stop(self) -> None:
        """End all ranks."""
        if self.fork_server is not None:
            for member in self.members:
                self.fork_server.end(member)
            self.fork_server.stop()
        self.fork_server, self.members = None, []


def _stacks(members: list[Member], folder: str) -> str:
    """Return the stacks of all threads of ranks, and the processor seconds of each rank."""
    for member in members:
        os.kill(member.pid, SHOW_STACKS)
    time.sleep(1.0)  # A handler in C writes them, also where a thread never lets Python go on.
    text = ""
    for rank, member in enumerate(members):
        # After the name, which may have spaces: state, ..., user and system time as 12th, 13th.
        fields = Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()
        seconds = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
        text += f"\n\nrank {rank}, state {fields[0]}, {seconds:.1f} s of processor so far:\n"
        stacks = Path(folder, f"stacks{rank}")
        text += stacks.read_text() if stacks.exists() else "it has not begun\n"
    return text


def _serve_forks(control: Connection, inherited: Connection | None, install: bool) -> None:
    """Run in the server: import modules, then fork a rank for each path received, or end one.

    Args:
        control: requests, and an answer to each.
        inherited: the other end of ``control``, which a forked server closes.
        install: whether to install the shape hook, where beartype is installed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends all processes.
    if inherited is not None:
        inherited.close()
    filters = list(warnings.filters)
    warnings.simplefilter("error")
    # Seen on torch 2.11 with gloo: noise about the default device that no test can act on.
    warnings.filterwarnings("ignore", module="torch.*")
    try:
        sys.path[:], modules = control.recv()
    except (EOFError, OSError):
        return
    if install and importlib.util.find_spec("beartype") is not None:
        install_shape_checks()
    gc.disable()  # As in pytest's own collection: nearly all of these objects stay.
    try:
        for module in modules:
            importlib.import_module(module)
    except BaseException:  # noqa: BLE001 - the parent raises it, with this traceback
        control.send(traceback.format_exc())
        return
    control.send("")
    set_aside()
    gc.enable()
    living: set[int] = set()
    while True:
        try:
            request: list[str] | int | Command = control.recv()
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
        if pid == 0 and isinstance(request, tuple):
            if os.fork() == 0:  # a grandchild, for whose end the server need not wait
                control.close()
                watch_command(pipe, filters, request)
            os._exit(0)
        if isinstance(request, tuple):
            pipe.close()
            os.waitpid(pid, 0)
            continue
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
        stacks = open(os.path.join(os.path.dirname(store), f"stacks{rank}"), "w")  # noqa: SIM115
        faulthandler.register(SHOW_STACKS, stacks)
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
            pipe.send_bytes(pickle.dumps((None, None)))
            answer = pickle.dumps((None, function(*pickle.loads(arguments))))
            dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 - the parent raises it, with this traceback
            # The group stays open until the parent ends this rank: closing it would fail the
            # peers, whose error about a lost connection might come first.
            answer = pickle.dumps((traceback.format_exc(), None))
        pipe.send_bytes(answer)
        stacks.close()
        gc.collect()  # Frees models, and groups with their polling threads.


def _start_afresh() -> None:
    """Forget what earlier tests left here: random state, compiled code, meshes of DTensors."""
    import torch

    from mcore_parallel.mesh import forget_meshes

    torch.manual_seed(0)
    torch.compiler.reset()
    forget_meshes()
