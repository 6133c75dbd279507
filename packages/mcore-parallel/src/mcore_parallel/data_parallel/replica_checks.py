"""Checks that replicas of weights and gradients are equal: in the first step, or on request.

Layers declare which tensors several ranks hold (data ranks, ``Part.replicas``,
``ParamLayout.tied``), and all other code relies on these declarations. A wrong declaration
raises no error by itself: ranks with different seeds train different models, a norm that gets a
part of the tokens learns from that part only, and if two stages give their layers one name, a
checkpoint loses one layer. So the first step compares digests of tensors; later steps cost
nothing. ``check_weights`` compares weights again: they differ if a GPU computed wrongly.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.collectives import all_gather, all_reduce
from mcore_parallel.data_parallel.gradient_sync import OwnedRange, OwnedUnit
from mcore_parallel.digests import unlike_tensors
from mcore_parallel.mesh import Axis, ParallelContext
from mcore_parallel.sharding import NamedParameter, Part

BINS = 64
"""Partial sums of each gradient that are compared."""
TOLERANCE = 0.05
"""Largest difference of two sums, relative to the largest sum: far above the effect of the
order of summation, and far below the effect of different tokens."""
FLOOR = 1e-3
"""Fraction of the largest sum of all parameters below which differences are noise."""


def check_replicas(units: Sequence[OwnedUnit], ctx: ParallelContext) -> None:
    """Compare replicated weights and summed gradients over the ranks that hold them.

    Every rank calls it. A few small collectives over each axis with replicas, and one over the
    world; the host waits for them.

    Raises:
        ValueError: on every rank if any differ: names the first parameter, or refers to the
            other ranks' messages.
    """
    faults = [
        *(
            f"{copies} began with different weights{who}. Give torch the same seed on all of "
            "them before the model is built, or load the same weights."
            for copies, who in _unequal_weights(units, only_equal=False)
        ),
        *_unequal_gradients(units),
        *_names_of_two_stages(units, ctx.pp),
    ]
    if _any_rank(bool(faults), ctx):
        raise ValueError(
            faults[0] if faults else "replicas differ on other ranks, whose errors name them"
        )


def check_weights(units: Sequence[OwnedUnit], ctx: ParallelContext) -> None:
    """Compare, bit for bit, the replicas of weights that every update keeps equal.

    These are the replicas of data ranks and tied weights: their gradients are summed once, so
    equal weights stay equal. A difference means that a value was computed, stored or sent
    wrongly. Replicas on tensor ranks are not compared: each rank computes its own gradient, and
    may round differently. Every rank calls it, between steps: a few small collectives, for
    which the host waits; each rank reads its weights once.

    Args:
        units: units of this rank, with no gather of weights in flight.
        ctx: the rank grid.

    Raises:
        UnlikeWeightsError: on every rank if any differ: names the first parameter, and the
            ranks that differ from the majority.
    """
    faults = [
        f"{copies} do not have the same weights any more{who}: a processor, its memory or a "
        "link is faulty, or code other than the optimizer changed them."
        for copies, who in _unequal_weights(units, only_equal=True)
    ]
    if _any_rank(bool(faults), ctx):
        raise UnlikeWeightsError(
            faults[0]
            if faults
            else "copies of a weight differ on other ranks, whose errors name it."
        )


def _any_rank(is_wrong: bool, ctx: ParallelContext) -> bool:
    flag = torch.tensor(float(is_wrong), device=ctx.device)
    return bool(all_reduce(flag, ctx.world, "max").item())


class UnlikeWeightsError(RuntimeError):
    """Replicas of a weight differ although their updates were equal."""


def _unequal_weights(
    units: Sequence[OwnedUnit], *, only_equal: bool
) -> Iterator[tuple[str, str]]:
    """Yield the weights whose copies differ, and the deviating ranks if a majority agrees."""
    shared: dict[str, tuple[Axis, list[tuple[str, Tensor]]]] = {}
    for unit in reversed(units):
        for copy in unit.copies():
            if copy.axis.size > 1 and (copy.stays_equal or not only_equal):
                views = shared.setdefault(copy.axis.name, (copy.axis, []))[1]
                views.append((copy.name, copy.weights))
    for _, (axis, views) in sorted(shared.items(), key=lambda entry: entry[0]):
        for name, column in unlike_tensors(views, axis):
            # A column holds one digest of each rank of the axis.
            usual, count = Counter(column).most_common(1)[0]
            odd = [rank for rank, x in zip(axis.ranks, column, strict=True) if x != usual]
            who = f" (unlike the others: {odd})" if 2 * count > axis.size else ""  # majority
            yield f"{name}: ranks {list(axis.ranks)} of axis {axis.name}, which share it,", who


def _unequal_gradients(units: Sequence[OwnedUnit]) -> Iterator[str]:
    """Yield the parameters declared whole on every replica whose gradients differ."""
    shared: dict[str, tuple[Axis, list[tuple[str, Tensor]]]] = {}
    for unit in reversed(units):
        grads = unit.own_grads()
        owned = {o.named.parameter: o for o in unit.owned_ranges()}
        for named in reversed(unit.members):
            axis = _holders_of_whole_gradients(named.layout.parts)
            if axis is not None:
                entry = (named.name, _sums(owned.get(named.parameter), grads))
                shared.setdefault(axis.name, (axis, []))[1].append(entry)
    for _, (axis, entries) in sorted(shared.items(), key=lambda entry: entry[0]):
        low, high = _range(torch.stack([sums for _, sums in entries]), axis)
        # Sums compare only if all ranks own the same range of the parameter.
        is_same_range = (low == high)[:, BINS:].all(1)
        low, high = low[:, :BINS], high[:, :BINS]
        scale = torch.maximum(low.abs(), high.abs()).amax(1)
        allowed = TOLERANCE * torch.maximum(scale, FLOOR * scale.amax())
        differs = (high - low).amax(1) > allowed  # False for NaN, which proves nothing
        wrong = (differs & is_same_range).tolist()
        for (name, _), is_wrong in zip(entries, wrong, strict=True):
            if is_wrong:
                yield (
                    f"{name}: ranks {list(axis.ranks)} of axis {axis.name} hold it whole, but "
                    "compute different gradients. If each rank gets a part of the tokens "
                    "(sequence parallelism), declare it with replicated(module, axis, "
                    "partial=True); else add the copy_to or reduction that is missing between "
                    "the split layers."
                )


def _holders_of_whole_gradients(parts: Sequence[Part]) -> Axis | None:
    axis = parts[0].replicas
    is_whole = len(parts) == 1 and axis.size > 1 and parts[0].partial.size == 1
    return axis if is_whole else None


def _names_of_two_stages(units: Sequence[OwnedUnit], pp: Axis) -> Iterator[str]:
    """Yield an error for each box of a logical tensor that two stages or two chunks hold."""
    boxes = [
        (part.name, part.offsets)
        for named in _parameters(units)
        for part in named.layout.parts
        if named.layout.tied.size == 1
    ]
    device = units[0].own_grads().device
    numbers = [_number(box) for box in boxes]
    padded = torch.tensor(numbers, dtype=torch.int64, device=device)
    # Stages may hold different numbers of boxes: pad to the longest list with -1.
    length = all_reduce(torch.tensor(len(numbers), device=device), pp, "max")
    padded = F.pad(padded, (0, int(length.item()) - len(numbers)), value=-1)
    counts = Counter(all_gather(padded, pp).tolist())
    for (name, _), number in zip(boxes, numbers, strict=True):
        if counts[number] > 1:
            yield (
                f"{name} is a parameter of two pipeline stages: a checkpoint would keep only "
                "one of them. Name layers by their number in the whole model, such as "
                "ModuleDict({str(i): layer})."
            )


def _parameters(units: Sequence[OwnedUnit]) -> Iterator[NamedParameter]:
    """Walk units in forward order, so that the first fault is that of the first layer."""
    return (named for unit in reversed(units) for named in reversed(unit.members))


def _number(box: tuple[str, tuple[int, ...]]) -> int:
    return int.from_bytes(blake2b(repr(box).encode(), digest_size=7).digest(), "little")


def _sums(owned: OwnedRange | None, grads: Float[Tensor, " n"]) -> Float[Tensor, " digest"]:
    """Return ``BINS`` float64 sums of the owned part of a gradient, then its flat range."""
    first, stop = (0, 0) if owned is None else (owned.first, owned.stop)
    x = grads[:0] if owned is None else owned.view(grads)
    padded = F.pad(x, (0, BINS - len(x) % BINS))
    sums = padded.view(BINS, -1).sum(1, dtype=torch.float64)
    return torch.cat([sums, sums.new_tensor([first, stop])])


def _range(x: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return the elementwise minimum and maximum over the ranks; one all-reduce."""
    # min(x) = -max(-x), so one maximum over both signs gives both.
    high, low = all_reduce(torch.stack([x, -x]), axis, "max")
    return -low, high
