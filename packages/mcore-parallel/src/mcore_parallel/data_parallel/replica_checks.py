"""Checks that replicas are equal: all in the first step, the weights' on request later.

Layers declare what several ranks hold in common (data ranks, ``Part.replicas``,
``ParamLayout.tied``), and all other code relies on it. A wrong declaration crashes nothing:
ranks with different seeds train different models, a norm that sees a part of the tokens learns
from that part only, and of two stages that give their layers one name a checkpoint loses one.
So the first step compares digests, not weights; later steps cost nothing. ``check_weights``
compares weights again, which differ once a GPU has computed wrongly.
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
"""Sums of each gradient that are compared."""
TOLERANCE = 0.05
"""Largest difference of two sums, relative to the largest sum: far above the effect of the
order of summation, and far below that of other tokens."""
FLOOR = 1e-3
"""Of the largest sum of all parameters, below which differences are noise."""


def check_replicas(units: Sequence[OwnedUnit], ctx: ParallelContext) -> None:
    """Compare what ranks hold in common; all ranks call it, with summed gradients.

    A few small collectives over each axis with replicas, and one over the world; the host
    waits for them.

    Raises:
        ValueError: on every rank if any differ: names the first parameter, or refers to the
            other ranks' messages.
    """
    faults = [
        *(
            f"{copies} began with different weights{who}. Seed torch alike on all of them "
            "before the model is made, or load the same weights."
            for copies, who in _unequal_weights(units, only_equal=False)
        ),
        *_unequal_gradients(units),
        *_names_of_two_stages(units, ctx.pp),
    ]
    if _any_rank(bool(faults), ctx):
        raise ValueError(
            faults[0] if faults else "other ranks hold unlike replicas, and say which"
        )


def check_weights(units: Sequence[OwnedUnit], ctx: ParallelContext) -> None:
    """Compare the replicas of weights that every update keeps equal to the last bit.

    These are the replicas of data ranks and tied weights: their gradients are summed once, so
    equal weights stay equal. A difference means that a value was computed, stored or sent
    wrongly. (Replicas on tensor ranks are left out: each rank computes its gradient, and may
    round differently.) All ranks call it, between steps: a few small collectives, for which
    the host waits; each rank reads its weights once.

    Args:
        units: of this rank, with no gather of weights in flight.
        ctx: the rank grid.

    Raises:
        UnlikeWeightsError: on every rank if any differ: names the first parameter, and the
            ranks that are unlike most others.
    """
    faults = [
        f"{copies} do not have the same weights any more{who}: a processor, its memory or a "
        "link works wrongly, or code other than the optimizer changed them."
        for copies, who in _unequal_weights(units, only_equal=True)
    ]
    if _any_rank(bool(faults), ctx):
        raise UnlikeWeightsError(
            faults[0]
            if faults
            else "other ranks hold unlike copies of a weight, and say which."
        )


def _any_rank(is_wrong: bool, ctx: ParallelContext) -> bool:
    found = torch.tensor(float(is_wrong), device=ctx.device)
    return bool(all_reduce(found, ctx.world, "max").item())


class UnlikeWeightsError(RuntimeError):
    """Replicas of a weight differ although their updates were equal."""


def _unequal_weights(
    units: Sequence[OwnedUnit], *, only_equal: bool
) -> Iterator[tuple[str, str]]:
    """Yield the weights whose copies differ, and the odd ranks if a majority agrees."""
    shared: dict[str, tuple[Axis, list[tuple[str, Tensor]]]] = {}
    for unit in reversed(units):
        for copy in unit.copies():
            if copy.axis.size > 1 and (copy.stays_equal or not only_equal):
                known = shared.setdefault(copy.axis.name, (copy.axis, []))[1]
                known.append((copy.name, copy.weights))
    for _, (axis, views) in sorted(shared.items(), key=lambda entry: entry[0]):
        for name, column in unlike_tensors(views, axis):
            usual, count = Counter(column).most_common(1)[0]
            odd = [rank for rank, x in zip(axis.ranks, column, strict=True) if x != usual]
            who = f" (unlike the others: {odd})" if 2 * count > axis.size else ""
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
    for _, (axis, found) in sorted(shared.items(), key=lambda entry: entry[0]):
        low, high = _range(torch.stack([sums for _, sums in found]), axis)
        is_same_range = (low == high)[:, BINS:].all(1)
        low, high = low[:, :BINS], high[:, :BINS]
        scale = torch.maximum(low.abs(), high.abs()).amax(1)
        allowed = TOLERANCE * torch.maximum(scale, FLOOR * scale.amax())
        differs = (high - low).amax(1) > allowed  # False for NaN, which proves nothing
        wrong = (differs & is_same_range).tolist()
        for (name, _), is_wrong in zip(found, wrong, strict=True):
            if is_wrong:
                yield (
                    f"{name}: ranks {list(axis.ranks)} of axis {axis.name} hold it whole, but "
                    "make different gradients. If each sees a part of the tokens (sequence "
                    "parallelism), declare it with replicated(module, axis, partial=True); "
                    "else a copy_to or a reduction is missing between the split layers."
                )


def _holders_of_whole_gradients(parts: Sequence[Part]) -> Axis | None:
    axis = parts[0].replicas
    is_whole = len(parts) == 1 and axis.size > 1 and parts[0].partial.size == 1
    return axis if is_whole else None


def _names_of_two_stages(units: Sequence[OwnedUnit], pp: Axis) -> Iterator[str]:
    """Yield logical tensors of which two stages, or two chunks of one, hold the same box."""
    boxes = [
        (part.name, part.offsets)
        for named in _parameters(units)
        for part in named.layout.parts
        if named.layout.tied.size == 1
    ]
    device = units[0].own_grads().device
    known = [_number(box) for box in boxes]
    own = torch.tensor(known, dtype=torch.int64, device=device)
    length = all_reduce(torch.tensor(len(known), device=device), pp, "max")
    own = F.pad(own, (0, int(length.item()) - len(known)), value=-1)
    counts = Counter(all_gather(own, pp).tolist())
    for (name, _), number in zip(boxes, known, strict=True):
        if counts[number] > 1:
            yield (
                f"{name} is a parameter of two pipeline stages: a checkpoint would keep one of "
                "them. Name layers by their number in the whole model, such as "
                "ModuleDict({str(i): layer})."
            )


def _parameters(units: Sequence[OwnedUnit]) -> Iterator[NamedParameter]:
    """Walk units in forward order, so that the first fault is that of the first layer."""
    return (named for unit in reversed(units) for named in reversed(unit.members))


def _number(box: tuple[str, tuple[int, ...]]) -> int:
    return int.from_bytes(blake2b(repr(box).encode(), digest_size=7).digest(), "little")


def _sums(owned: OwnedRange | None, grads: Float[Tensor, " n"]) -> Float[Tensor, " digest"]:
    """Sum the owned part of a gradient in ``BINS`` runs, float64; append its flat range."""
    first, stop = (0, 0) if owned is None else (owned.first, owned.stop)
    x = grads[:0] if owned is None else owned.view(grads)
    padded = F.pad(x, (0, BINS - len(x) % BINS))
    sums = padded.view(BINS, -1).sum(1, dtype=torch.float64)
    return torch.cat([sums, sums.new_tensor([first, stop])])


def _range(x: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return the elementwise minimum and maximum over the ranks; one all-reduce."""
    high, low = all_reduce(torch.stack([x, -x]), axis, "max")
    return -low, high
