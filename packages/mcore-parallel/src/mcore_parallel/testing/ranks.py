"""Programs on several gloo ranks of this host, and whole tensors from what the ranks hold."""

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
    """Run ``function(*arguments)`` on every rank of a new gloo world on this host's CPU.

    Inside, ``torch.distributed`` is initialised: read the rank from it, or build a
    ``ParallelContext``. The function is found by its file and name, so a module-level function
    of a test file works under any import mode of pytest; arguments and results must pickle
    (tensors do). A rank has one thread. When a rank fails, all ranks are ended. A script calls
    it under ``if __name__ == "__main__"``, as its ranks read the script again.

    Args:
        function: a module-level function.
        world_size: ranks, 1 or more.
        arguments: passed to every rank.
        timeout_s: after which the ranks are ended, from their start.

    Returns:
        One result for each rank, in rank order.

    Raises:
        RuntimeError: if a rank raises or dies (its traceback inside), or time runs out.
    """
    address = import_address(function)
    # Ranks are forked from one process that has loaded torch and what this process has loaded
    # of our packages; forks of this process itself would inherit torch's threads.
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
                here, there = context.Pipe()
                with there:
                    processes.append(
                        context.Process(
                            target=_run_rank, args=(there, rank, *task), daemon=True
                        )
                    )
                    processes[-1].start()
                ranks[here] = rank
            return collect_results(ranks, timeout_s)
        except BaseException:
            for process in processes:
                process.kill()
            raise
        finally:
            for pipe in ranks:
                pipe.close()  # A rank that has answered ends then.
            for process in processes:
                process.join()


def collect_results(ranks: Mapping[Connection, int], timeout_s: float) -> list[Any]:
    """Wait for a pickled (traceback or None, result) of every rank; return the results.

    Args:
        ranks: the pipe to each rank, and its number.
        timeout_s: for all of them together.

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
                f"{timeout_s} s"
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
    """Run in a rank: join the world, send the function's result or a traceback."""
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
        # The group stays open until the parent has read this: closing it would fail the other
        # ranks, whose error about a lost connection might come first.
        answer = pickle.dumps((traceback.format_exc(), None))
    pipe.send_bytes(answer)
    pipe.poll(None)  # until the parent closes its end


def import_address(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return how another process finds a function: module, file, name.

    Raises:
        ValueError: if it is no module-level function of a file.
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


def gather_logical(shards: "Mapping[str, Shard]", world: "Axis") -> "dict[str, Tensor]":
    """Assemble whole logical tensors from the pieces of all ranks, checking each element.

    Gathers over ``world`` as pickled objects; for tests of small models.

    Args:
        shards: what this rank holds, with its replicas (``ctx.data_axes()``) filled in.
        world: all ranks that hold pieces.

    Returns:
        Logical name to whole tensor on the CPU, equal on all ranks.

    Raises:
        ValueError: if ranks disagree on a shape or dtype, no rank holds an element, it has
            no owner or two, or if two replicas of it are not equal to the last bit.
    """
    import numpy as np
    import torch.distributed as dist

    own = [
        (name, s.shape, s.dtype, s.is_owner, p.offsets, p.lengths, _packed(p.data))
        for name, s in shards.items()
        for p in s.pieces
    ]
    boxes = [own]
    if world.size > 1:
        boxes = [[] for _ in range(world.size)]
        dist.all_gather_object(boxes, own, group=world.group)
    # As integers of the dtype's size, in numpy: of small tensors torch's calls cost the most.
    kinds: dict[str, tuple[Any, Dtype]] = {}
    whole: dict[str, np.ndarray] = {}
    is_held: dict[str, np.ndarray] = {}
    num_owners: dict[str, np.ndarray] = {}
    # A box that several ranks hold is unpacked and put into its place once.
    placed: dict[tuple[Any, ...], bytes] = {}
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
            place = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            if is_owner:
                num_owners[name][place] += 1
            if placed.get((name, offsets, lengths)) == content:
                continue
            placed[name, offsets, lengths] = content
            bits = np.ndarray(lengths, whole[name].dtype, content)
            before, known = whole[name][place], is_held[name][place]
            if known.any() and not np.array_equal(bits[known], before[known]):
                here, there = (_tensor(b[known], dtype) for b in (bits, before))
                worst = (here - there).abs().max().item()
                raise ValueError(f"replicas of {name} differ: rank {rank} by {worst:.3g}")
            whole[name][place] = bits
            is_held[name][place] = True
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
    """Return a piece as bytes; torch would pickle a tensor for longer than a step takes."""
    import torch

    return data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(bits: "np.ndarray", dtype: "Dtype") -> "Tensor":
    import torch

    return torch.from_numpy(bits).view(dtype)
