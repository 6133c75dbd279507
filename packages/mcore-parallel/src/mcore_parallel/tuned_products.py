"""Matrix products by the fastest algorithm for their shape, found by timing.

torch takes the algorithm that cublasLt proposes first. Under full load another of its
proposals is often faster, by up to a tenth: inside ``tuned_products`` the first product of
each shape times them all, in turns, and that shape keeps the winner. torch's own product is
among the candidates and stays where nothing beats it.

All algorithms accumulate in float32; they differ in the order of sums. Which one wins depends
on timing, so under ``torch.use_deterministic_algorithms`` products stay torch's. So do those
on a CPU, small ones, those in compiled code, those of strides that cublasLt cannot take, and
shapes that are first met while a CUDA graph is recorded.
"""

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.cublaslt import (
    ALIGNMENT,
    WORKSPACE_BYTES,
    Algorithms,
    CublasLtError,
    Product,
    describe,
)

log = logging.getLogger(__name__)

LEAST_FLOPS = 5 * 10**10
"""Of a product worth timing: 0.08 ms of an H200."""
NUM_ROUNDS = 4
"""Turns of each candidate; the first one warms the device up."""
TURN_MS = 8.0
"""Of a candidate in the heats; in the final, among the ``NUM_FINALISTS``, ``FINAL_TURN_MS``:
which algorithm is fastest shows only after the device's clock has settled under its load."""
NUM_FINALISTS = 2
FINAL_TURN_MS = 40.0
LEAST_GAIN = 0.005
"""By which a candidate must beat torch's product: less is noise."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """The algorithm of one shape; None: torch's own product."""

    algorithms: Algorithms | None = None
    number: int = 0


@dataclass(slots=True)
class _Tuning:
    """What this process knows; a switch like those of ``torch.backends``."""

    is_on: bool = False
    choices: dict[tuple[int, Product], _Choice] = field(default_factory=dict)
    workspaces: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """By device and stream: products of one stream follow each other."""


_tuning = _Tuning()


@contextmanager
def tuned_products() -> Iterator[None]:
    """Choose algorithms by timing inside; for the whole process, all threads included.

    What was found is kept for the next time. The first product of a shape waits for the
    device and takes about a second.
    """
    before, _tuning.is_on = _tuning.is_on, True
    try:
        yield
    finally:
        _tuning.is_on = before


def multiply(
    a: Float[Tensor, "M K"],
    b: Float[Tensor, "K N"],
    *,
    out: Float[Tensor, "M N"] | None = None,
    adds: bool = False,
) -> Float[Tensor, "M N"]:
    """Return ``a b``; no gradient.

    Args:
        a: first factor, any strides.
        b: second factor, likewise.
        out: where to write; its dtype may be wider than that of the factors. None: new.
        adds: add to ``out`` in the product's epilogue instead of replacing it.
    """
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    choice = _choice_for(a, b, out, adds) if _may_tune(a, b, out) else None
    if choice is None or choice.algorithms is None:
        plain_product(a, b, out, adds=adds)
    else:
        choice.algorithms.run(choice.number, a, b, out, _workspace(a.device))
    return out


def multiply_rows(
    x: Float[Tensor, "*B K"], matrix: Float[Tensor, "K N"]
) -> Float[Tensor, "*B N"]:
    """Return ``x matrix`` for rows of any shape; no gradient where products are tuned."""
    if torch.compiler.is_compiling() or not _tuning.is_on:
        return x @ matrix
    return multiply(x.reshape(-1, x.shape[-1]), matrix).view(*x.shape[:-1], matrix.shape[1])


def plain_product(a: Tensor, b: Tensor, out: Tensor, *, adds: bool) -> None:
    """Twin of ``multiply`` by torch: into ``out``, in ``out``'s dtype."""
    if a.dtype != out.dtype and not a.is_cuda:
        a, b = a.to(out.dtype), b.to(out.dtype)
    if a.dtype == out.dtype:
        out.addmm_(a, b) if adds else torch.mm(a, b, out=out)
    elif adds:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def fastest(times: dict[int, list[float]]) -> int:
    """Choose among candidates by the times of their turns; -1 is torch's own product.

    The median counts, without the first turn. A candidate must beat -1 by ``LEAST_GAIN``.
    """
    medians = {number: _median(turns) for number, turns in times.items()}
    best = min(medians, key=lambda number: medians[number])
    return best if medians[best] < (1 - LEAST_GAIN) * medians[-1] else -1


def finalists(times: dict[int, list[float]], count: int) -> list[int]:
    """Return torch's product, -1, and the ``count`` others whose medians are least."""
    others = sorted(
        (number for number in times if number >= 0), key=lambda n: _median(times[n])
    )
    return [-1, *others[:count]]


def _median(turns: list[float]) -> float:
    """Leave out the first turn, which warms the device up."""
    return statistics.median(turns[1:])


def _may_tune(a: Tensor, b: Tensor, out: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and _tuning.is_on
        and a.is_cuda
        and 2 * a.shape[0] * a.shape[1] * b.shape[1] >= LEAST_FLOPS
        and not torch.are_deterministic_algorithms_enabled()
        and not any(matrix.data_ptr() % ALIGNMENT for matrix in (a, b, out))
    )


def _choice_for(a: Tensor, b: Tensor, out: Tensor, adds: bool) -> _Choice | None:
    product = describe(a, b, out, adds=adds)
    if product is None:
        return None
    key = (a.device.index, product)
    if key not in _tuning.choices:
        if torch.cuda.is_current_stream_capturing():  # nothing can be timed
            return None
        _tuning.choices[key] = _choose(product, a, b, out)
    return _tuning.choices[key]


def _choose(product: Product, a: Tensor, b: Tensor, out: Tensor) -> _Choice:
    """Time torch's product and all proposals; ``out`` is spoiled unless the product adds."""
    try:
        # What is added to must not change: its times are taken on another matrix.
        target = torch.zeros_like(out) if product.adds else out
        with torch.cuda.device(a.device):
            algorithms = Algorithms(product)
            workspace = _workspace(a.device)
    except (CublasLtError, torch.OutOfMemoryError) as error:
        log.warning("products of %d GFLOP stay torch's: %s", product.flops // 10**9, error)
        return _Choice()

    def run(number: int) -> Callable[[], None]:
        if number < 0:
            return lambda: plain_product(a, b, target, adds=product.adds)
        return lambda: algorithms.run(number, a, b, target, workspace)

    candidates = {}
    for number in range(-1, len(algorithms)):
        try:
            run(number)()
            candidates[number] = run(number)
        except CublasLtError:
            continue  # a proposal that this device cannot run
    heats = _in_turns(candidates, TURN_MS)
    best = finalists(heats, NUM_FINALISTS)
    times = _in_turns({number: candidates[number] for number in best}, FINAL_TURN_MS)
    number = fastest(times)
    gain = _median(times[-1]) / _median(times[number]) - 1
    log.debug("%s: algorithm %d of %d, %.1f %%", product, number, len(algorithms), 100 * gain)
    return _Choice() if number < 0 else _Choice(algorithms, number)


def _in_turns(
    candidates: dict[int, Callable[[], None]], turn_ms: float
) -> dict[int, list[float]]:
    """Return the milliseconds of a call by candidate and turn; waits for the device."""
    once = _milliseconds(next(iter(candidates.values())), 1)
    num_calls = max(2, round(turn_ms / max(once, 1e-3)))
    times: dict[int, list[float]] = {number: [] for number in candidates}
    for _ in range(NUM_ROUNDS):
        for number, call in candidates.items():
            times[number].append(_milliseconds(call, num_calls))
    return times


def _milliseconds(call: Callable[[], None], num_calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / num_calls


def _workspace(device: torch.device) -> Tensor:
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    if key not in _tuning.workspaces:
        _tuning.workspaces[key] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _tuning.workspaces[key]


def choices() -> Sequence[tuple[Product, int]]:
    """List what was chosen so far: products and numbers of proposals, -1 for torch's own."""
    return [
        (product, -1 if choice.algorithms is None else choice.number)
        for (_, product), choice in _tuning.choices.items()
    ]
