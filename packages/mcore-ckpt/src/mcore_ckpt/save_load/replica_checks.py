"""Checks that boxes held by several ranks are equal, before one of the copies is written.

A plan identifies boxes by name and region, and writes each once. Two stages that name different
layers alike, ranks with different seeds or unsynchronized ranks look like replicas to the plan,
and all but one of their boxes would be lost silently. Digests of 64 bits are therefore
compared; boxes are sent only where digests differ, to tell copies that drifted by rounding from
different data.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf, prod

import torch
from torch import Tensor

from mcore_ckpt.save_load.rank_agreement import agreed, any_rank, gather_json
from mcore_ckpt.save_load.tensor_exchange import Move, exchange, travel_device
from mcore_ckpt.storage.boxes import Box, box_text, intersect, shifted, small_spans
from mcore_ckpt.storage.files import narrowed
from mcore_ckpt.storage.index import DTYPE_BYTES
from mcore_ckpt.storage.shard_plans import Claim, Write, listed
from mcore_parallel.collectives import all_reduce, host_device
from mcore_parallel.digests import digest
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Shard

log = logging.getLogger(__name__)

ROUNDING = 0.05
"""Share of a box's largest magnitude by which copies that ranks update separately may differ:
far above the effect of orders of summation, far below that of other data or layers."""

_PART_BYTES = 1 << 26
_MOST_NAMED = 12


def compare_replicas(
    claims: Sequence[Mapping[str, Claim]], shards: Mapping[str, Shard], world: Axis
) -> None:
    """Check that boxes held by several ranks, or twice by one, are equal.

    Reads them once, in place, and waits for the device; one all-reduce of 16 bytes a box over
    ``world``, which all ranks call. Boxes are sent only if digests differ. Of boxes that are
    split differently, such as sharded moments of a tied embedding on two stages, the parts
    common to a box of either are compared.

    Args:
        claims: claims of all ranks, equal on all ranks.
        shards: what this rank holds.
        world: the ranks.

    Raises:
        ValueError: on all ranks, with boxes and ranks that differ. Floating-point boxes within
            ``ROUNDING`` of each other are logged instead.
        RuntimeError: on all ranks, if one cannot read its memory.
    """
    common = _held_twice(claims)
    if not common:
        return
    held = _held(common, shards)
    digests: list[int] = []
    with agreed(world):  # a device may be out of memory
        digests = _on_host([digest(box) for boxes in held.values() for box in boxes])
    own = {number: [digests.pop(0) for _ in boxes] for number, boxes in held.items()}
    unlike = _unlike(own, len(common), world)
    if not unlike:
        return
    device = travel_device((box for boxes in held.values() for box in boxes), world)
    is_far = any(
        _is_far(common[number], held.get(number, []), claims, world, device)
        for number in unlike
    )
    reports = gather_json(
        {number: own.get(number, []) for number in unlike[:_MOST_NAMED]}, world
    )
    sentences = [
        f"{_name(common[number], claims)}: unlike on {_groups(number, reports)}"
        for number in unlike[:_MOST_NAMED]
    ]
    sentences += [_name(common[number], claims) for number in unlike[_MOST_NAMED:]]
    if is_far:
        raise ValueError(
            f"cannot save different data that ranks hold under one name: {listed(sentences)}\n"
            "Only one of them would be saved. Copies must be equal: seed torch alike before "
            "the model is made, and sum gradients over the ranks that share it. Different "
            "tensors need different names: of layers, by their number in the whole model; of "
            "data private to a rank, with the rank. Or let one rank alone name it."
        )
    log.warning(
        "copies differ by rounding, and one of each is saved, so that a run resumed from here "
        "is not bitwise this one: %s",
        listed(sentences),
    )


def _held_twice(claims: Sequence[Mapping[str, Claim]]) -> list[Write]:
    """List boxes that are held more than once, in the same order on all ranks."""
    counts: Counter[Write] = Counter()
    owned: dict[str, dict[Box, None]] = {}
    copied: dict[str, dict[Box, None]] = {}
    for mine in claims:
        for name, claim in mine.items():
            counts.update(Write(name, box) for box in claim.boxes)
            boxes = (owned if claim.owner else copied).setdefault(name, {})
            boxes.update(dict.fromkeys(claim.boxes))
    common = [write for write, count in counts.items() if count > 1]
    for name, boxes in copied.items():
        theirs = owned.get(name, {})
        for box in (one for one in boxes if one not in theirs):
            parts = (intersect(box, other) for other in theirs)
            common += [Write(name, part) for part in parts if part]
    return list(dict.fromkeys(common))


def _held(common: Sequence[Write], shards: Mapping[str, Shard]) -> dict[int, list[Tensor]]:
    """Return the memory of boxes by their number in the list."""
    wanted: dict[str, list[tuple[int, Box]]] = {}
    for number, write in enumerate(common):
        wanted.setdefault(write.name, []).append((number, write.box))
    held: dict[int, list[Tensor]] = {}
    for name, shard in shards.items():
        for piece in shard.pieces:
            whole = tuple(piece.offsets), tuple(piece.lengths)
            for number, box in wanted.get(name, []):
                if intersect(whole, box) == box:
                    inside = narrowed(piece.data.detach(), shifted(box, piece.offsets))
                    held.setdefault(number, []).append(inside)
    return held


def _on_host(numbers: Sequence[Tensor]) -> list[int]:
    """Copy numbers of any devices to the host; waits once for each device."""
    found = [0] * len(numbers)
    for device in {number.device for number in numbers}:
        places = [i for i, number in enumerate(numbers) if number.device == device]
        values = torch.stack([numbers[i] for i in places]).tolist()
        for place, value in zip(places, values, strict=True):
            found[place] = value
    return found


def _unlike(own: Mapping[int, Sequence[int]], count: int, world: Axis) -> list[int]:
    """Return the boxes whose digests differ, by the maximum and minimum over all ranks."""
    least = torch.iinfo(torch.int64).min
    ends = torch.full((2, count), least, dtype=torch.int64)
    for number, digests in own.items():
        ends[0, number], ends[1, number] = max(digests), ~min(digests)
    high, low = all_reduce(ends.to(host_device(world)), world, "max").cpu()
    return (high != ~low).nonzero().view(-1).tolist()


def _is_far(
    write: Write,
    mine: Sequence[Tensor],
    claims: Sequence[Mapping[str, Claim]],
    world: Axis,
    device: torch.device,
) -> bool:
    """Send the first holder's box to all others, which compare; equal on all ranks."""
    ranks = [
        rank
        for rank, held in enumerate(claims)
        if write.name in held
        and any(intersect(box, write.box) == write.box for box in held[write.name].boxes)
    ]
    size = DTYPE_BYTES[claims[ranks[0]][write.name].dtype]
    whole = (0,) * len(write.box[1]), write.box[1]
    parts = list(small_spans(whole[1], whole, _PART_BYTES // size))
    gaps = [_Gap() for _ in mine]
    for part in parts:
        for gap, other in zip(gaps[1:], mine[1:], strict=True):
            gap.widen(narrowed(mine[0], part), narrowed(other, part))

    def take(part: Box, content: Tensor) -> None:
        there = content.view(mine[0].dtype).view(part[1])
        gaps[0].widen(narrowed(mine[0], part), there)

    moves = [
        Move(ranks[0], rank, prod(part[1]) * size, part) for part in parts for rank in ranks[1:]
    ]
    exchange(moves, lambda part: narrowed(mine[0], part), take, world=world, device=device)
    return any_rank([any(gap.is_wide for gap in gaps)], world)[0]


class _Gap:
    """Largest difference between two boxes, and their largest magnitude."""

    def __init__(self) -> None:
        self._apart = self._largest = 0.0

    def widen(self, a: Tensor, b: Tensor) -> None:
        """Add parts; values that are not floating-point and differ are infinitely far apart."""
        if not a.is_floating_point():
            self._apart = inf
            return
        wide = torch.float64 if a.dtype == torch.float64 else torch.float32
        x, y = a.to(wide), b.to(a.device, wide)
        apart = (x - y).abs().nan_to_num(nan=inf, posinf=inf)
        self._apart = max(self._apart, apart.max().item())
        self._largest = max(self._largest, x.abs().max().item(), y.abs().max().item())

    @property
    def is_wide(self) -> bool:
        """Whether the difference is too large for rounding."""
        return self._apart == inf or self._apart > ROUNDING * self._largest


def _name(write: Write, claims: Sequence[Mapping[str, Claim]]) -> str:
    shape = next(mine[write.name].shape for mine in claims if write.name in mine)
    return write.name if write.box[1] == shape else f"{write.name} {box_text(write.box)}"


def _groups(number: int, reports: Sequence[Mapping[str, Sequence[int]]]) -> str:
    """Group ranks by equal data: ``ranks [0, 2] and [1, 3]``."""
    ranks: dict[int, list[int]] = {}
    for rank, digests in enumerate(reports):
        for one in digests[str(number)]:
            ranks.setdefault(one, []).append(rank)
    return "ranks " + " and ".join(str(group) for group in ranks.values())
