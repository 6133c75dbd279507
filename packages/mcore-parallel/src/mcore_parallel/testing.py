"""Many ranks in a test: ``run_ranks`` on a warm pool of gloo processes.

Spawning ranks costs 6 to 40 seconds on two cores, so one pool of processes, forked from a
server that has torch loaded, serves the whole test run. Each call makes a fresh world of
the first N of them and destroys it after; a test that fails on one rank ends the pool, so
no rank is left waiting, and the next call starts another.

Children run one thread each, and check jaxtyping shapes with beartype unless asked not to
(compiled code is tested without the hook).
"""

import importlib
import importlib.util
import multiprocessing as mp
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Loaded later, under the shape hook of the children.
    from torch import Tensor

    from mcore_parallel.mesh import Axis
    from mcore_parallel.sharding import Shard

CHECKED_PACKAGES = ("mcore_parallel", "mcore_moe", "mcore_models", "mcore_ckpt", "mcore_infer")


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_s: float = 120.0,
    check_shapes: bool = True,
) -> list[Any]:
    """Run ``function(*arguments)`` on every rank of a fresh gloo world.

    Inside, ``torch.distributed`` is initialised: ask it for the rank, or build a
    ``ParallelContext``. The function is found by its file and name, so any module-level
    function of a test file works; arguments and results must pickle (tensors do).

    Args:
        function: a module-level function.
        world_size: ranks, 1 or more.
        arguments: handed to every rank.
        timeout_s: after which the ranks are ended.
        check_shapes: run with jaxtyping annotations checked; false for compiled code.

    Returns:
        One result a rank, in rank order.

    Raises:
        RuntimeError: if a rank raises or dies (its traceback inside), or time runs out.
    """
    pool = _pool(check_shapes)
    return pool.run(function, world_size, arguments, timeout_s)


def gather_logical(shards: "Mapping[str, Shard]", world: "Axis") -> "dict[str, Tensor]":
    """Assemble whole logical tensors from the pieces of all ranks, checking each element.

    Gathers over ``world`` as pickled objects; for tests of small models.

    Args:
        shards: what this rank holds, with its replicas (``ctx.data_axes()``) filled in.
        world: all ranks that hold pieces.

    Returns:
        Logical name to whole tensor on the CPU, equal on all ranks.

    Raises:
        ValueError: if ranks disagree on a shape or dtype, an element is held by nobody, has
            no owner or two, or if two replicas of it are not equal to the last bit.
    """
    import torch
    import torch.distributed as dist

    own = [
        (
            name,
            s.shape,
            s.dtype,
            s.is_owner,
            p.offsets,
            p.lengths,
            p.data.detach().cpu().clone(),
        )
        for name, s in shards.items()
        for p in s.pieces
    ]
    boxes = [own]
    if world.size > 1:
        boxes = [[] for _ in range(world.size)]
        dist.all_gather_object(boxes, own, group=world.group)
    whole: dict[str, Tensor] = {}
    holders: dict[str, Tensor] = {}
    owners: dict[str, Tensor] = {}
    for rank, box in enumerate(boxes):
        for name, shape, dtype, is_owner, offsets, lengths, data in box:
            if name not in whole:
                whole[name] = torch.zeros(shape, dtype=dtype)
                holders[name] = torch.zeros(shape, dtype=torch.int32)
                owners[name] = torch.zeros(shape, dtype=torch.int32)
            if whole[name].shape != shape or whole[name].dtype != dtype:
                raise ValueError(
                    f"{name} is {shape} {dtype} on rank {rank} and elsewhere "
                    f"{tuple(whole[name].shape)} {whole[name].dtype}"
                )
            place = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            known = holders[name][place] > 0
            before = whole[name][place]
            if not torch.equal(_bits(data[known]), _bits(before[known])):
                worst = (data - before)[known].abs().max().item()
                raise ValueError(f"replicas of {name} differ: rank {rank} by {worst:.3g}")
            whole[name][place] = data
            holders[name][place] += 1
            owners[name][place] += is_owner
    for name in whole:
        if holes := int((holders[name] == 0).sum()):
            raise ValueError(f"{name} has {holes} elements that no rank holds")
        if not bool((owners[name] == 1).all()):
            least, most = int(owners[name].min()), int(owners[name].max())
            raise ValueError(
                f"elements of {name} have {least} to {most} owners instead of one: its layout "
                "misses replicas, or data=ctx.data_axes() was not given to named_shards"
            )
    return whole


def _bits(x: "Tensor") -> "Tensor":
    import torch

    return x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)


def shut_down_pools() -> None:
    """End the warm processes; the next ``run_ranks`` starts new ones."""
    while _POOLS:
        _POOLS.popitem()[1].stop()


class _Pool:
    """Warm processes and the pipes to them."""

    def __init__(self, check_shapes: bool) -> None:
        self.check_shapes = check_shapes
        self.context = mp.get_context("forkserver")
        # numpy and torch only: our own packages must be imported under the shape hook.
        self.context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
        self.members: list[tuple[Any, Connection]] = []

    def run(
        self, function: Callable[..., Any], world_size: int, arguments: tuple, timeout_s: float
    ) -> list[Any]:
        self._grow(world_size)
        folder = tempfile.mkdtemp(prefix="ranks")
        # On their own: a child must know the test's file before it can read its classes.
        packed = pickle.dumps(arguments)
        task = (_address(function), world_size, os.path.join(folder, "store"), packed)
        try:
            for rank in range(world_size):
                self.members[rank][1].send_bytes(pickle.dumps((rank, *task)))
            return self._collect(world_size, timeout_s)
        except BaseException:
            self.stop()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _grow(self, size: int) -> None:
        if any(not process.is_alive() for process, _ in self.members):
            self.stop()
        while len(self.members) < size:
            here, there = self.context.Pipe()
            process = self.context.Process(
                target=_serve, args=(there, self.check_shapes, list(sys.path)), daemon=True
            )
            process.start()
            there.close()
            self.members.append((process, here))

    def _collect(self, world_size: int, timeout_s: float) -> list[Any]:
        waiting = {self.members[rank][1]: rank for rank in range(world_size)}
        results: list[Any] = [None] * world_size
        deadline = time.monotonic() + timeout_s
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            ready: list[Any] = wait(list(waiting), left_s)
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
        for process, pipe in self.members:
            pipe.close()
            process.kill()
        for process, _ in self.members:
            process.join()
        self.members = []


# The one pool a kind that lives as long as the test run: the reason this room exists.
_POOLS: dict[bool, _Pool] = {}


def _pool(check_shapes: bool) -> _Pool:
    if check_shapes not in _POOLS:
        _POOLS[check_shapes] = _Pool(check_shapes)
    return _POOLS[check_shapes]


def _address(function: Callable[..., Any]) -> tuple[str, str, str]:
    path = getattr(sys.modules.get(function.__module__), "__file__", None)
    if path is None or "<locals>" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} must be a module-level function of a file")
    return function.__module__, path, function.__qualname__


def _serve(pipe: Connection, check_shapes: bool, path: list[str]) -> None:
    """Run in a child: answer tasks until the pipe closes."""
    import torch
    import torch.distributed as dist

    sys.path[:] = path
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Seen on torch 2.11 with gloo: noise about the default device that no test can act on.
    warnings.filterwarnings("ignore", module="torch.*")
    if check_shapes:
        from jaxtyping import install_import_hook

        install_import_hook(list(CHECKED_PACKAGES), "beartype.beartype")
    while True:
        try:
            rank, address, world_size, store, arguments = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            function = _load(address)
            _start_afresh()
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
            )
            answer = pickle.dumps((None, function(*pickle.loads(arguments))))
            dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 - the parent raises it, with this traceback
            # The group stays: closing it would fail the peers, whose complaint about a lost
            # connection might come first. The parent ends this process.
            answer = pickle.dumps((traceback.format_exc(), None))
        pipe.send_bytes(answer)


def _start_afresh() -> None:
    """Forget what earlier tests left in this process: random state and compiled code."""
    import torch

    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _load(address: tuple[str, str, str]) -> Callable[..., Any]:
    module_name, file, name = address
    if module_name.startswith("mcore_"):
        module = importlib.import_module(module_name)
        return getattr(module, name)
    # A test file is no importable module under pytest's importlib mode: load it by path, under
    # the name that it has there, so that its classes travel both ways.
    module = sys.modules.get(module_name)
    if module is None:
        # Unpickling a class of ``a.b.c`` asks for ``a`` first, folder or not.
        parents = module_name.split(".")[:-1]
        for count in range(1, len(parents) + 1):
            parent = ".".join(parents[:count])
            sys.modules.setdefault(parent, ModuleType(parent))
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
