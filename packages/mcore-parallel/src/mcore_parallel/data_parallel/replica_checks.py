"""Ranks that should hold the same do: looked at when the first gradients are summed.

What is held in common is declared (data ranks, ``Part.replicas``, ``Layout.tied``), and the
rest of the house believes it. Where it is not so, nothing crashes: ranks seeded apart train
different models, a norm that sees a part of the tokens only learns from that part, and two
stages that give their layers one name lose one of them in a checkpoint. So the first step
compares. Digests travel, not weights; later steps pay nothing, unless they are asked to
compare the weights again, which a GPU that computes wrongly would set apart.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.collectives import all_gather, all_reduce
from mcore_parallel.data_parallel.buckets import Bucket, OwnedRange
from mcore_parallel.digests import digest
from mcore_parallel.mesh import Axis, ParallelContext
from mcore_parallel.sharding import NamedParameter, Part

BINS = 64
"""Sums by which two gradients are told apart."""
TOLERANCE = 0.05
"""By which such sums may differ, of the largest: far above what an order of summation does,
and far below what other tokens do."""
FLOOR = 1e-3
"""Of the largest sum of all parameters, below which differences are noise."""


def check_replicas(buckets: Sequence[Bucket], ctx: ParallelContext) -> None:
    """Compare what ranks hold in common; all ranks call it, with summed gradients.

    A few small collectives over each axis that holds replicas, and one over the world, for
    which the host waits.

    Args:
        buckets: of this rank, before the first update.
        ctx: the layout.

    Raises:
        ValueError: on every rank if any differ: names the first parameter, or asks to look
            at what other ranks say.
    """
    told = [
        *(
            f"{copies} began with different weights{who}. Seed torch alike on all of them "
            "before the model is made, or load the same weights."
            for copies, who in _unequal_weights(buckets, ctx, _all_holders)
        ),
        *_unequal_gradients(buckets),
        *_names_of_two_stages(buckets, ctx.pp),
    ]
    found = torch.tensor(float(bool(told)), device=ctx.device)
    if not all_reduce(found, ctx.world, "max").item():
        return
    raise ValueError(told[0] if told else "other ranks hold unlike replicas, and say which")


def check_weights(buckets: Sequence[Bucket], ctx: ParallelContext) -> None:
    """Compare the copies of weights which every update keeps the same to the last bit.

    Those of data ranks and tied ones: equal gradients, summed once, change equal weights. So
    what differs was computed, stored or sent wrongly. (Copies on tensor ranks each make their
    gradient by themselves, and may round apart.) All ranks call it, between steps: a few
    small collectives, for which the host waits; each rank reads its weights once.

    Args:
        buckets: of this rank, with no gather of weights on its way.
        ctx: the layout.

    Raises:
        UnlikeWeightsError: on every rank if any differ: names the first parameter, and the
            ranks that are unlike most others.
    """
    told = [
        f"{copies} do not have the same weights any more{who}: a processor, its memory or a "
        "link works wrongly, or something beside the optimizer changed them."
        for copies, who in _unequal_weights(buckets, ctx, _equal_holders)
    ]
    found = torch.tensor(float(bool(told)), device=ctx.device)
    if all_reduce(found, ctx.world, "max").item():
        raise UnlikeWeightsError(
            told[0] if told else "other ranks hold unlike copies of a weight, and say which."
        )


class UnlikeWeightsError(RuntimeError):
    """Ranks that made the same updates to the same weights do not hold the same."""


_Holders = Iterable[tuple[Axis, Tensor]]
"""Axes whose ranks hold a box in common, and the box."""


def _equal_holders(named: NamedParameter, ctx: ParallelContext) -> _Holders:
    weight = named.parameter.detach()
    return [(ctx.data_axes()[named.layout.data], weight), (named.layout.tied, weight)]


def _all_holders(named: NamedParameter, ctx: ParallelContext) -> _Holders:
    weight = named.parameter.detach()
    parts = [(part.replicas, part.view(weight)) for part in named.layout.parts]
    return [*_equal_holders(named, ctx), *parts]


def _unequal_weights(
    buckets: Sequence[Bucket],
    ctx: ParallelContext,
    holders: Callable[[NamedParameter, ParallelContext], _Holders],
) -> Iterator[tuple[str, str]]:
    """Compare bits: yield whose copies of what differ, and which of them, if most agree."""
    shared: dict[str, tuple[Axis, list[tuple[str, Tensor]]]] = {}
    for named in _parameters(buckets):
        for axis, view in holders(named, ctx):
            if axis.size > 1:
                shared.setdefault(axis.name, (axis, []))[1].append((named.name, view))
    for _, (axis, views) in sorted(shared.items(), key=lambda entry: entry[0]):
        digests = torch.stack([digest(view) for _, view in views])
        columns = all_gather(digests[None], axis).t().tolist()
        for (name, _), column in zip(views, columns, strict=True):
            if len(counts := Counter(column)) == 1:
                continue
            usual, count = counts.most_common(1)[0]
            odd = [rank for rank, x in zip(axis.ranks, column, strict=True) if x != usual]
            who = f" (unlike the others: {odd})" if 2 * count > axis.size else ""
            yield f"{name}: ranks {list(axis.ranks)} of axis {axis.name}, which share it,", who


def _unequal_gradients(buckets: Sequence[Bucket]) -> Iterator[str]:
    """Compare gradients that were said to be whole on every replica."""
    shared: dict[str, tuple[Axis, list[tuple[str, Tensor]]]] = {}
    for bucket in reversed(buckets):
        grads = bucket.owned(bucket.grads)
        owned = {o.named.parameter: o for o in bucket.owned_ranges()}
        for slot in reversed(bucket.slots):
            axis = _holders_of_whole_gradients(slot.named.layout.parts)
            if axis is not None:
                entry = (slot.named.name, _sums(owned.get(slot.named.parameter), grads))
                shared.setdefault(axis.name, (axis, []))[1].append(entry)
    for _, (axis, found) in sorted(shared.items(), key=lambda entry: entry[0]):
        low, high = _range(torch.stack([sums for _, sums in found]), axis)
        is_same_range = (low == high)[:, BINS:].all(1)
        low, high = low[:, :BINS], high[:, :BINS]
        scale = torch.maximum(low.abs(), high.abs()).amax(1)
        allowed = TOLERANCE * torch.maximum(scale, FLOOR * scale.amax())
        differs = (high - low).amax(1) > allowed  # False for NaN, which says nothing
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


def _names_of_two_stages(buckets: Sequence[Bucket], pp: Axis) -> Iterator[str]:
    """Look for a box of a logical tensor that two stages, or two chunks of one, hold."""
    boxes = [
        (part.name, part.offsets)
        for named in _parameters(buckets)
        for part in named.layout.parts
        if named.layout.tied.size == 1
    ]
    device = buckets[0].params.device
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


def _parameters(buckets: Sequence[Bucket]) -> Iterator[NamedParameter]:
    """Walk buckets against the order of backward: what comes first in the model is told."""
    return (slot.named for bucket in reversed(buckets) for slot in reversed(bucket.slots))


def _number(box: tuple[str, tuple[int, ...]]) -> int:
    return int.from_bytes(blake2b(repr(box).encode(), digest_size=7).digest(), "little")


def _sums(owned: OwnedRange | None, grads: Float[Tensor, " n"]) -> Float[Tensor, " digest"]:
    """Sum what is owned of a gradient in ``BINS`` runs, float64; and say what it is."""
    first, stop = (0, 0) if owned is None else (owned.first, owned.stop)
    x = grads[:0] if owned is None else owned.view(grads)
    padded = F.pad(x, (0, BINS - len(x) % BINS))
    sums = padded.view(BINS, -1).sum(1, dtype=torch.float64)
    return torch.cat([sums, sums.new_tensor([first, stop])])


def _range(x: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return the least and the largest of the ranks' numbers, one collective."""
    high, low = all_reduce(torch.stack([x, -x]), axis, "max")
    return -low, high
