"""Many ranks in a test, and commands, on processes that have torch loaded.

Starting Python with torch costs seconds, a world of ranks 6 to 40 s on two cores. So
``run_ranks`` uses one pool of gloo processes for the whole test run, and ``run_command`` forks
a command from the same server (``worker_pool``) instead of starting ``python -m``.
"""

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_parallel.testing.commands import run_forked
from mcore_parallel.testing.worker_pool import OUR_PACKAGES, Pool

if TYPE_CHECKING:  # Loaded later, under the shape hook of the children.
    import numpy as np
    from torch import Tensor
    from torch import dtype as Dtype

    from mcore_parallel.mesh import Axis
    from mcore_parallel.sharding import Shard

# One pool for each value of check_shapes; it lives as long as the test run.
_POOLS: dict[bool, Pool] = {}


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


def _pool(check_shapes: bool) -> Pool:
    if check_shapes not in _POOLS:
        _POOLS[check_shapes] = Pool(check_shapes)
    return _POOLS[check_shapes]


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
