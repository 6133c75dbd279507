"""Runs functions on several gloo ranks of this host, and assembles tensors from shards."""

import importlib
import importlib.util
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # A rank loads torch before it loads these modules.
    import numpy as np
    from torch import Tensor
    from torch import dtype as Dtype

    from mcore_parallel.mesh import Axis
    from mcore_parallel.sharding import Shard


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Run ``function(*arguments)`` on every rank of a new gloo world; return all results.

    The function may use ``torch.distributed`` and build a ``ParallelContext``. Ranks are
    processes on this host's CPU with one thread each. They load the function by file and name,
    so a module-level function of a test file works under any import mode of pytest; arguments
    and results must pickle (tensors do). If a rank fails, all ranks are ended. A script must
    call ``run_ranks`` under ``if __name__ == "__main__"``, because its ranks import the script.

    Args:
        function: a module-level function.
        world_size: number of ranks, 1 or more.
        arguments: passed to every rank.
        timeout_s: limit for all ranks together, starting included.

    Returns:
        One result for each rank, in rank order.

    Raises:
        RuntimeError: if a rank raises (with its traceback) or dies, or time runs out.
    """
    address = import_address(function)
    # Ranks are forked from a server process that has imported torch and those of our modules
    # that this process has; forks of this process would inherit the state of torch's threads.
    context = mp.get_context("forkserver")
    loaded = [name for name in sys.modules if name.startswith("mcore_")]
    context.set_forkserver_preload(
        ["torch.distributed", *(name for name in loaded if not name.endswith("__main__"))]
    )
    ranks: dict[Connection, int] = {}
    processes = []
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        store = os.path.join(folder, "store")
        task = (address, world_size, store, pickle.dumps(arguments))
        try:
            for rank in range(world_size):
                parent_end, rank_end = context.Pipe()
                with rank_end:
                    processes.append(
                        context.Process(
                            target=_run_rank, args=(rank_end, rank, *task), daemon=True
                        )
                    )
                    processes[-1].start()
                ranks[parent_end] = rank
            return collect_results(ranks, timeout_s)
        except BaseException:
            for process in processes:
                process.kill()
            raise
        finally:
            for pipe in ranks:
                pipe.close()  # lets ranks that have answered end
            for process in processes:
                process.join()


def collect_results(
    ranks: Mapping[Connection, int],
    timeout_s: float,
    describe_silent: Callable[[], str] = str,
) -> list[Any]:
    """Wait for a pickled (traceback or None, result) of every rank; return the results.

    Args:
        ranks: rank number of each pipe.
        timeout_s: limit for all ranks together.
        describe_silent: called when time runs out; its text ends the error's message.

    Raises:
        RuntimeError: if a rank sends a traceback or dies, or time runs out.
    """
    waiting, results = dict(ranks), [None] * len(ranks)
    deadline = time.monotonic() + timeout_s
    while waiting:
        ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(
                f"ranks {sorted(waiting.values())} of {len(ranks)} gave no answer in "
                f"{timeout_s} s{describe_silent()}"
            )
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                failure, results[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                raise RuntimeError(f"rank {rank} of {len(ranks)} died") from None
            if failure:
                raise RuntimeError(f"rank {rank} of {len(ranks)} failed:\n{failure}")
    return results


def _run_rank(
    pipe: Connection,
    rank: int,
    address: tuple[str, str, str],
    world_size: int,
    store: str,
    arguments: bytes,
) -> None:
    """Body of a rank's process: join the world, send the function's result or a traceback."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        function = load_function(address)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
        )
        answer = pickle.dumps((None, function(*pickle.loads(arguments))))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - the parent raises it, with this traceback
        # The group stays open until the parent has read the traceback: closing it would make
        # other ranks fail, and their lost connections might be reported first.
        answer = pickle.dumps((traceback.format_exc(), None))
    pipe.send_bytes(answer)
    pipe.poll(None)  # until the parent closes its end


def import_address(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return module, file and name of a function, for ``load_function`` in another process.

    Raises:
        ValueError: if the function is not a module-level function of a file.
    """
    path = getattr(sys.modules.get(function.__module__), "__file__", None)
    if path is None or "<locals>" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} must be a module-level function of a file")
    return function.__module__, path, function.__qualname__


def load_function(address: tuple[str, str, str]) -> Callable[..., Any]:
    """Return the function that ``import_address`` named in another process."""
    module_name, file, name = address
    if module_name.startswith("mcore_"):
        module = importlib.import_module(module_name)
        return getattr(module, name)
    # Under pytest's importlib mode a test file cannot be imported by name: load it by path
    # under the same module name, so that its classes pickle in both directions.
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


def gather_logical(shards: "Mapping[str, Shard]", world: "Axis") -> "dict[str, Tensor]":
    """Assemble logical tensors from the pieces of all ranks, checking every element.

    Gathers over ``world`` as pickled objects; for tests of small models.

    Args:
        shards: this rank's shards, with replicas over the data ranks (``ctx.data_axes()``).
        world: all ranks that hold pieces.

    Returns:
        Full tensors on the CPU by logical name, equal on all ranks.

    Raises:
        ValueError: if ranks disagree on a shape or dtype, an element is on no rank, has no
            owner or two, or has replicas that are not bitwise equal.
    """
    import numpy as np
    import torch.distributed as dist

    own_boxes = [
        (name, s.shape, s.dtype, s.is_owner, p.offsets, p.lengths, _packed(p.data))
        for name, s in shards.items()
        for p in s.pieces
    ]
    boxes = [own_boxes]
    if world.size > 1:
        boxes = [[] for _ in range(world.size)]
        dist.all_gather_object(boxes, own_boxes, group=world.group)
    # numpy integers of the dtype's size: for small tensors the overhead of torch calls
    # dominates.
    kinds: dict[str, tuple[Any, Dtype]] = {}
    whole: dict[str, np.ndarray] = {}
    is_held: dict[str, np.ndarray] = {}
    num_owners: dict[str, np.ndarray] = {}
    # Bytes of each box that was copied: equal replicas need no second copy.
    copied: dict[tuple[Any, ...], bytes] = {}
    for rank, box in enumerate(boxes):
        for name, shape, dtype, is_owner, offsets, lengths, content in box:
            kind = tuple(shape), dtype
            if name not in whole:
                kinds[name] = kind
                whole[name] = np.zeros(shape, f"i{dtype.itemsize}")
                is_held[name] = np.zeros(shape, bool)
                num_owners[name] = np.zeros(shape, np.int32)
            if kinds[name] != kind:
                raise ValueError(
                    f"{name} is {shape} {dtype} on rank {rank} and elsewhere "
                    f"{kinds[name][0]} {kinds[name][1]}"
                )
            region = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            if is_owner:
                num_owners[name][region] += 1
            if copied.get((name, offsets, lengths)) == content:
                continue
            copied[name, offsets, lengths] = content
            bits = np.ndarray(lengths, whole[name].dtype, content)
            assembled, was_held = whole[name][region], is_held[name][region]
            if was_held.any() and not np.array_equal(bits[was_held], assembled[was_held]):
                new, old = (_tensor(b[was_held], dtype) for b in (bits, assembled))
                worst = (new - old).abs().max().item()
                raise ValueError(f"replicas of {name} differ: rank {rank} by {worst:.3g}")
            whole[name][region] = bits
            is_held[name][region] = True
    for name in whole:
        if holes := int((~is_held[name]).sum()):
            raise ValueError(f"{name} has {holes} elements that no rank holds")
        if not (num_owners[name] == 1).all():
            least, most = int(num_owners[name].min()), int(num_owners[name].max())
            raise ValueError(
                f"elements of {name} have {least} to {most} owners instead of one: its layout "
                "misses replicas, or data=ctx.data_axes() was not given to named_shards"
            )
    return {name: _tensor(bits, kinds[name][1]) for name, bits in whole.items()}


def _packed(data: "Tensor") -> bytes:
    """Return a piece as bytes: pickling a tensor takes torch longer than a training step."""
    import torch

    return data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(bits: "np.ndarray", dtype: "Dtype") -> "Tensor":
    import torch

    return torch.from_numpy(bits).view(dtype)
