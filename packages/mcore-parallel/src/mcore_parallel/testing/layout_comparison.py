"""Compares a program under several rank grids with the same program on one rank, on a CPU.

The program is a function of a ``ParallelContext``. It runs on one rank, and on gloo ranks for
each rank grid; its results are assembled by logical name and compared. In float64 only the
order of sums differs, so a real difference is many orders of magnitude larger.
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
"""Tolerance of float64 programs, AdamW steps included: errors from the order of sums."""
LEAST_SCALE = 1e-3
"""Smallest scale of an error, as a share of the largest value of all tensors."""


def compare_layouts(
    trial: "Trial",
    layouts: Iterable[tuple[int, ParallelConfig]],
    *arguments: Any,
    tolerance: float = EXACT,
    timeout_s: float = 120.0,
    run: Callable[..., "list[Any]"] = run_ranks,
) -> dict[str, float]:
    """Compare a program under several rank grids with its results on one rank.

    Ranks are gloo processes on this host. For tests of small models: full tensors are sent as
    bytes.

    Args:
        trial: a module-level function, called on every rank with the rank's context and the
            arguments; torch has the same seed on all ranks. Returns a dict of shards
            (``named_shards``, ``DataParallel.grad_shards``, ``named_shards`` of an optimizer)
            and of tensors that every rank has in full, such as an all-reduced loss.
        layouts: number of ranks and rank grid of each layout.
        arguments: passed to every rank; they must pickle.
        tolerance: largest allowed error, see ``tensor_errors``.
        timeout_s: limit for each layout.
        run: starts the ranks of one world, with the arguments of ``run_ranks``.

    Returns:
        The worst error over the layouts, by name.

    Raises:
        AssertionError: if a layout exceeds the tolerance or returns other names; gives layout,
            name and error.
        RuntimeError: if a rank raises, dies or hangs, with its traceback; also if no rank
            holds an element, or replicas are not bitwise equal.
    """
    address = import_address(trial)

    def results(num_ranks: int, config: ParallelConfig) -> "list[dict[str, Tensor]]":
        """Return for each rank its full tensors together with the assembled logical ones."""
        answers = run(_run_trial, num_ranks, address, config, arguments, timeout_s=timeout_s)
        logical = answers[0][0]
        return [logical | tensors for _, tensors in answers]

    (expected,) = results(1, ParallelConfig())
    worst = dict.fromkeys(expected, 0.0)
    for num_ranks, config in layouts:
        for actual in results(num_ranks, config):
            layout = f"{trial.__name__} on {num_ranks} ranks, {config}"
            for name, error in _errors(actual, expected, tolerance, layout).items():
                worst[name] = max(worst[name], error)
    return worst


def tensor_errors(
    found: "Mapping[str, Tensor]", expected: "Mapping[str, Tensor]", noisy: Collection[str] = ()
) -> dict[str, float]:
    """Return the error of every tensor by name: max|a-b| / max(max|b|, 1e-3 M).

    M is the largest magnitude of all expected tensors, so the error of a tensor that is almost
    zero is relative to the other tensors. A different shape is an infinite error.

    Args:
        found: tensors to compare with ``expected``.
        expected: tensors of the run on one rank.
        noisy: names of tensors whose error is relative to M.

    Raises:
        ValueError: if the names differ.
    """
    if sorted(found) != sorted(expected):
        unmatched = sorted(set(found) ^ set(expected))
        raise ValueError(f"tensors on one side only: {', '.join(unmatched[:5])}")
    largest = max((float(t.abs().max()) for t in expected.values() if t.numel()), default=0.0)
    least = {name: largest * (1.0 if name in noisy else LEAST_SCALE) for name in expected}
    return {name: _distance(found[name], expected[name], least[name]) for name in expected}


def _errors(
    actual: "Mapping[str, Tensor]",
    expected: "Mapping[str, Tensor]",
    tolerance: float,
    layout: str,
) -> dict[str, float]:
    try:
        errors = tensor_errors(actual, expected)
    except ValueError as error:
        raise AssertionError(f"{layout}: {error}") from None
    wrong = [name for name, error in errors.items() if not error <= tolerance]  # NaN is wrong
    if wrong:
        name = max(wrong, key=lambda n: inf if isnan(errors[n]) else errors[n])
        raise AssertionError(
            f"{layout}: {name} is off by {errors[name]:.1e}, {tolerance:.1e} is allowed; of "
            f"{len(errors)} tensors {len(wrong)} are further off."
        )
    return errors


def _distance(found: "Tensor", expected: "Tensor", least: float) -> float:
    if found.shape != expected.shape or not found.numel():
        return float("inf") if found.shape != expected.shape else 0.0
    difference = float((found.double() - expected.double()).abs().max())
    scale = max(float(expected.double().abs().max()), least)
    return difference / scale if difference or scale else 0.0


def _run_trial(
    address: tuple[str, str, str], config: ParallelConfig, arguments: tuple
) -> "tuple[dict[str, Tensor], dict[str, Tensor]]":
    """Run the trial on this rank; return logical tensors (rank 0 only) and full tensors."""
    from mcore_parallel.mesh import ParallelContext
    from mcore_parallel.sharding import Shard

    ctx = ParallelContext.build(config)
    results = load_function(address)(ctx, *arguments)
    shards = {name: value for name, value in results.items() if isinstance(value, Shard)}
    tensors = {name: value.detach() for name, value in results.items() if name not in shards}
    logical = gather_logical(shards, ctx.world)
    ctx.destroy()
    return logical if ctx.global_rank == 0 else {}, tensors
