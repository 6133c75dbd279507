"""Checks that boxes held by several ranks are equal, before one of the copies is written.

A plan identifies boxes by name and region, and writes each once. Pipeline stages that give
different layers one name, ranks with different seeds and unsynchronized ranks would look like
replicas, and all but one of their boxes would be lost silently. Ranks therefore compare digests
of 64 bits. Boxes are sent only if digests differ, to distinguish copies that drifted by
rounding from different data.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf, prod

import torch
from torch import Tensor

from mcore_ckpt.save_load.rank_agreement import any_rank, gather_json, raise_on_all_ranks
from mcore_ckpt.save_load.tensor_exchange import Move, exchange, travel_device
from mcore_ckpt.storage.boxes import Box, box_text, intersect, shift_box, small_spans
from mcore_ckpt.storage.files import narrow_to_box
from mcore_ckpt.storage.index import DTYPE_BYTES
from mcore_ckpt.storage.shard_plans import Claim, Write, list_problems
from mcore_parallel.collectives import all_reduce, host_device
from mcore_parallel.digests import digest
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Shard

log = logging.getLogger(__name__)

ROUNDING = 0.05
"""Largest difference of copies that ranks update separately, relative to a box's largest
magnitude: far above the effect of the order of summation, far below that of different data or
layers."""

_PART_BYTES = 1 << 26
_MOST_NAMED = 12


def compare_replicas(
    claims: Sequence[Mapping[str, Claim]], shards: Mapping[str, Shard], world: Axis
) -> None:
    """Check that boxes held by several ranks, or twice by one rank, are equal.

    Reads the boxes once, in place, and waits for the device; one all-reduce of 16 bytes per box
    over ``world``. Boxes are sent only if digests differ. If two holders split a tensor
    differently, such as sharded moments of a tied embedding on two stages, the intersections of
    their boxes are compared.

    Args:
        claims: claims of all ranks, equal on all ranks.
        shards: shards of this rank.
        world: the ranks that save together; all call this function.

    Raises:
        ValueError: on all ranks, with boxes and ranks that differ. Floating-point boxes within
            ``ROUNDING`` of each other are logged instead.
        RuntimeError: on all ranks, if one rank cannot read its memory.
    """
    common = _held_twice(claims)
    if not common:
        return
    held = _held(common, shards)
    digests: list[int] = []
    with raise_on_all_ranks(world):  # a device may be out of memory
        digests = _on_host([digest(box) for boxes in held.values() for box in boxes])
    own_digests = {number: [digests.pop(0) for _ in boxes] for number, boxes in held.items()}
    unequal = _unlike(own_digests, len(common), world)
    if not unequal:
        return
    device = travel_device((box for boxes in held.values() for box in boxes), world)
    is_far = any(
        _is_far(common[number], held.get(number, []), claims, world, device)
        for number in unequal
    )
    reports = gather_json(
        {number: own_digests.get(number, []) for number in unequal[:_MOST_NAMED]}, world
    )
    sentences = [
        f"{_name(common[number], claims)}: unlike on {_groups(number, reports)}"
        for number in unequal[:_MOST_NAMED]
    ]
    sentences += [_name(common[number], claims) for number in unequal[_MOST_NAMED:]]
    if is_far:
        raise ValueError(
            "cannot save different data that ranks hold under one name: "
            f"{list_problems(sentences)}\n"
            "Only one copy would be saved. Copies must be equal: seed torch equally before the "
            "model is built, and sum gradients over the ranks that share a tensor. Different "
            "tensors need different names: number layers over the whole model, and put the "
            "rank into names of data private to a rank. Or give the tensor on one rank only."
        )
    log.warning(
        "copies differ by rounding, and one of them is saved: a run that resumes from this "
        "step will not equal this run bit by bit: %s",
        list_problems(sentences),
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
    """Return this rank's copies of each box, by the box's number in ``common``."""
    boxes_by_name: dict[str, list[tuple[int, Box]]] = {}
    for number, write in enumerate(common):
        boxes_by_name.setdefault(write.name, []).append((number, write.box))
    held: dict[int, list[Tensor]] = {}
    for name, shard in shards.items():
        for piece in shard.pieces:
            piece_region = tuple(piece.offsets), tuple(piece.lengths)
            for number, box in boxes_by_name.get(name, []):
                if intersect(piece_region, box) == box:
                    inside = narrow_to_box(piece.data.detach(), shift_box(box, piece.offsets))
                    held.setdefault(number, []).append(inside)
    return held


def _on_host(numbers: Sequence[Tensor]) -> list[int]:
    """Return the values of scalar tensors; waits once for each device."""
    values_by_number = [0] * len(numbers)
    for device in {number.device for number in numbers}:
        positions = [i for i, number in enumerate(numbers) if number.device == device]
        values = torch.stack([numbers[i] for i in positions]).tolist()
        for position, value in zip(positions, values, strict=True):
            values_by_number[position] = value
    return values_by_number


def _unlike(own_digests: Mapping[int, Sequence[int]], count: int, world: Axis) -> list[int]:
    """Return the numbers of the boxes whose digests differ; one all-reduce over ``world``."""
    # One maximum gives both ends: max(~x) is ~min(x). Ranks without a box add the smallest int.
    smallest = torch.iinfo(torch.int64).min
    extremes = torch.full((2, count), smallest, dtype=torch.int64)
    for number, digests in own_digests.items():
        extremes[0, number], extremes[1, number] = max(digests), ~min(digests)
    high, low = all_reduce(extremes.to(host_device(world)), world, "max").cpu()
    return (high != ~low).nonzero().view(-1).tolist()


def _is_far(
    write: Write,
    mine: Sequence[Tensor],
    claims: Sequence[Mapping[str, Claim]],
    world: Axis,
    device: torch.device,
) -> bool:
    """Whether copies of a box differ by more than rounding; equal on all ranks.

    The first holder sends its box to the other holders, which compare.
    """
    ranks = [
        rank
        for rank, held in enumerate(claims)
        if write.name in held
        and any(intersect(box, write.box) == write.box for box in held[write.name].boxes)
    ]
    size = DTYPE_BYTES[claims[ranks[0]][write.name].dtype]
    full = (0,) * len(write.box[1]), write.box[1]
    parts = list(small_spans(full[1], full, _PART_BYTES // size))
    gaps = [_Gap() for _ in mine]
    for part in parts:
        # Boxes that this rank holds twice are compared here; other ranks compare theirs with
        # the box that the first holder sends.
        for gap, other in zip(gaps[1:], mine[1:], strict=True):
            gap.widen(narrow_to_box(mine[0], part), narrow_to_box(other, part))

    def take(part: Box, content: Tensor) -> None:
        received = content.view(mine[0].dtype).view(part[1])
        gaps[0].widen(narrow_to_box(mine[0], part), received)

    moves = [
        Move(ranks[0], rank, prod(part[1]) * size, part) for part in parts for rank in ranks[1:]
    ]
    exchange(moves, lambda part: narrow_to_box(mine[0], part), take, world=world, device=device)
    return any_rank([any(gap.is_wide for gap in gaps)], world)[0]


class _Gap:
    """Largest difference between two boxes, and their largest magnitude."""

    def __init__(self) -> None:
        self._apart = self._largest = 0.0

    def widen(self, a: Tensor, b: Tensor) -> None:
        """Add the difference of two parts; for values that are not floating-point, infinity."""
        if not a.is_floating_point():
            self._apart = inf
            return
        wide = torch.float64 if a.dtype == torch.float64 else torch.float32
        x, y = a.to(wide), b.to(a.device, wide)
        difference = (x - y).abs().nan_to_num(nan=inf, posinf=inf)
        self._apart = max(self._apart, difference.max().item())
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
