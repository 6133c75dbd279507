"""Compares a program under several rank grids with the same program on one rank, on a CPU.

The program is a function of a ``ParallelContext``. It runs on one rank, and in a world of gloo
ranks for each rank grid; its results are assembled by logical name and compared. In float64
only the order of sums differs, so a real difference is larger by many orders of magnitude.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf, isnan
from typing import TYPE_CHECKING, Any

from mcore_parallel.config import ParallelConfig
from mcore_parallel.testing.ranks import (
    gather_logical,
    import_address,
    load_function,
    run_ranks,
)

if TYPE_CHECKING:  # A rank loads torch before it loads these modules.
    from torch import Tensor

    from mcore_parallel.sharding import Shard

    Trial = Callable[..., Mapping[str, Shard | Tensor]]

EXACT = 1e-10
"""Error of float64 programs, AdamW's steps included, by the order of sums alone."""
LEAST_SCALE = 1e-3
"""Share of the model's largest value below which a tensor is measured on the model's scale."""


def compare_layouts(
    trial: "Trial",
    layouts: Iterable[tuple[int, ParallelConfig]],
    *arguments: Any,
    tolerance: float = EXACT,
    timeout_s: float = 120.0,
    run: Callable[..., "list[Any]"] = run_ranks,
) -> dict[str, float]:
    """Compare a program under several rank grids with its results on one rank.

    Ranks are gloo processes on this host. For tests of small models: whole tensors are sent
    as bytes.

    Args:
        trial: a module-level function; called on every rank with that rank's context, torch
            seeded alike on all, and the arguments. Returns what to compare, by name:
            shards (``named_shards``, ``DataParallel.grad_shards``, ``named_shards`` of an
            optimizer), and tensors that every rank has whole, such as a loss after its sum.
        layouts: number of ranks and degrees of each.
        arguments: passed to every rank; they must pickle.
        tolerance: largest error allowed, see ``tensor_errors``.
        timeout_s: for each layout.
        run: starts the ranks of one world, with the arguments of ``run_ranks``.

    Returns:
        The worst error of each name over the layouts.

    Raises:
        AssertionError: if a layout is further off, or has other names: says which, where and
            by how much.
        RuntimeError: if a rank raises, dies or hangs, with its traceback; also if no rank
            holds an element, or replicas are not equal to the last bit.
    """
    place = import_address(trial)

    def results(num_ranks: int, config: ParallelConfig) -> "list[dict[str, Tensor]]":
        """Return the whole tensors of each rank, each with the logical tensors of all."""
        found = run(_try_out, num_ranks, place, config, arguments, timeout_s=timeout_s)
        logical = found[0][0]
        return [logical | tensors for _, tensors in found]

    (expected,) = results(1, ParallelConfig())
    worst = dict.fromkeys(expected, 0.0)
    for num_ranks, config in layouts:
        for found in results(num_ranks, config):
            words = f"{trial.__name__} on {num_ranks} ranks, {config}"
            for name, error in _errors(found, expected, tolerance, words).items():
                worst[name] = max(worst[name], error)
    return worst


def tensor_errors(
    found: "Mapping[str, Tensor]", expected: "Mapping[str, Tensor]", noisy: Collection[str] = ()
) -> dict[str, float]:
    """Return the error of every tensor, by name: max|a-b| / max(max|b|, 1e-3 x the largest).

    The largest is that of all expected tensors, so that a tensor whose true value is nearly
    zero is measured on the model's scale. Another shape is infinitely far off.

    Args:
        found: to be compared with ``expected``.
        expected: of one rank.
        noisy: tensors to measure by the largest value of all.

    Raises:
        ValueError: if the two do not hold the same names.
    """
    if sorted(found) != sorted(expected):
        strange = sorted(set(found) ^ set(expected))
        raise ValueError(f"tensors on one side only: {', '.join(strange[:5])}")
    largest = max((float(t.abs().max()) for t in expected.values() if t.numel()), default=0.0)
    least = {name: largest * (1.0 if name in noisy else LEAST_SCALE) for name in expected}
    return {name: _distance(found[name], expected[name], least[name]) for name in expected}


def _errors(
    found: "Mapping[str, Tensor]",
    expected: "Mapping[str, Tensor]",
    tolerance: float,
    words: str,
) -> dict[str, float]:
    try:
        errors = tensor_errors(found, expected)
    except ValueError as error:
        raise AssertionError(f"{words}: {error}") from None
    wrong = [name for name, error in errors.items() if not error <= tolerance]  # NaN is wrong
    if wrong:
        name = max(wrong, key=lambda n: inf if isnan(errors[n]) else errors[n])
        raise AssertionError(
            f"{words}: {name} is off by {errors[name]:.1e}, {tolerance:.1e} is allowed; of "
            f"{len(errors)} tensors {len(wrong)} are further off."
        )
    return errors


def _distance(found: "Tensor", expected: "Tensor", least: float) -> float:
    if found.shape != expected.shape or not found.numel():
        return float("inf") if found.shape != expected.shape else 0.0
    difference = float((found.double() - expected.double()).abs().max())
    scale = max(float(expected.double().abs().max()), least)
    return difference / scale if difference or scale else 0.0


def _try_out(
    place: tuple[str, str, str], config: ParallelConfig, arguments: tuple
) -> "tuple[dict[str, Tensor], dict[str, Tensor]]":
    """Run on this rank; return logical tensors, on rank 0 only, and those given whole."""
    from mcore_parallel.mesh import ParallelContext
    from mcore_parallel.sharding import Shard

    ctx = ParallelContext.build(config)
    found = load_function(place)(ctx, *arguments)
    shards = {name: value for name, value in found.items() if isinstance(value, Shard)}
    tensors = {name: value.detach() for name, value in found.items() if name not in shards}
    logical = gather_logical(shards, ctx.world)
    ctx.destroy()
    return logical if ctx.global_rank == 0 else {}, tensors
