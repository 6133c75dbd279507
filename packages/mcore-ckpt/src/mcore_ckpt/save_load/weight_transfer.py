"""Transfers weights from one layout to another in memory, such as from training to serving.

Both layouts are on the ranks of one world. Ranks exchange the lists of boxes of logical tensors
that they hold and need, and each rank computes the same moves from these lists. Boxes are sent
in rounds of bounded size; a box that stays on its rank is copied locally.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mcore_ckpt.save_load.claims import build_claims, piece_box
from mcore_ckpt.save_load.rank_agreement import gather_json, raise_on_all_ranks
from mcore_ckpt.save_load.tensor_exchange import (
    ROUND_BYTES,
    ExchangeDigests,
    Move,
    exchange,
    travel_device,
)
from mcore_ckpt.storage.boxes import Box, cover_problems, intersect, shift_box
from mcore_ckpt.storage.files import DTYPES, narrow_to_box
from mcore_ckpt.storage.index import DTYPE_BYTES
from mcore_ckpt.storage.shard_plans import Claim, Write, list_problems, name_problems
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Shard

Claims = Mapping[str, Claim]


def transfer_weights(
    source: Mapping[str, Shard],
    target: Mapping[str, Shard],
    *,
    world: Axis,
    round_bytes: int = ROUND_BYTES,
) -> None:
    """Copy weights from the pieces of one layout to the pieces of another.

    Communicates over ``world``: all its ranks call it, each with its own shards; either layout
    may be empty on a rank. The receiver casts dtypes that differ.

    Args:
        source: logical name to pieces, which are read.
        target: logical name to pieces, which are written in place; the same names over all
            ranks as in ``source``, in the same shapes.
        world: ranks of both layouts.
        round_bytes: bound of the bytes in flight.

    Raises:
        ValueError: on all ranks, before anything is sent: if names or shapes differ, or the
            source lacks a part of a tensor.
    """
    WeightTransfer.plan(source, target, world=world).run(
        source, target, round_bytes=round_bytes
    )


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """Moves from one layout to another, planned once and run for each new set of weights."""

    world: Axis
    """Ranks of both layouts."""
    moves: Sequence[Move[Write]]
    """Equal on all ranks."""
    tensors: Mapping[str, Claim]
    """Shape and dtype of each logical tensor of the source, equal on all ranks."""
    device: torch.device
    """Device of the communication."""

    @classmethod
    def plan(
        cls, source: Mapping[str, Shard], target: Mapping[str, Shard], *, world: Axis
    ) -> "WeightTransfer":
        """Exchange the ranks' boxes and compute the moves, as ``transfer_weights`` does.

        Shards that ``run`` gets later must have the same boxes and dtypes.
        """
        with raise_on_all_ranks(world):
            own_claims = [build_claims(source), build_claims(target)]
        texts = [{name: claim.to_json() for name, claim in one.items()} for one in own_claims]
        held: list[Claims] = []
        wanted: list[Claims] = []
        for answer in gather_json(texts, world):
            for found, one in zip((held, wanted), answer, strict=True):
                found.append({name: Claim.from_json(claim) for name, claim in one.items()})
        moves = plan_transfer(held, wanted)
        tensors = {name: claim for one in held for name, claim in one.items()}
        sides = (source, target)
        pieces = (piece.data for one in sides for s in one.values() for piece in s.pieces)
        return cls(world, moves, tensors, travel_device(pieces, world))

    def run(
        self,
        source: Mapping[str, Shard],
        target: Mapping[str, Shard],
        *,
        round_bytes: int = ROUND_BYTES,
        digests: ExchangeDigests | None = None,
        moves: Sequence[Move[Write]] | None = None,
    ) -> None:
        """Copy weights by the planned moves; all ranks of the world call it together.

        Args:
            source: shards to read.
            target: shards to write in place.
            round_bytes: bound of the bytes in flight.
            digests: collects digests of the bytes sent and received.
            moves: a part of the planned moves, equal on all ranks; None: all.
        """

        def give(one: Write) -> Tensor:
            return _views(source[one.name], one.box)[0]

        def take(one: Write, data: Tensor) -> None:
            received = data.view(DTYPES[self.tensors[one.name].dtype]).view(one.box[1])
            for view in _views(target[one.name], one.box):
                view.copy_(received)

        exchange(
            self.moves if moves is None else moves,
            give,
            take,
            world=self.world,
            device=self.device,
            round_bytes=round_bytes,
            digests=digests,
        )


def plan_transfer(held: Sequence[Claims], wanted: Sequence[Claims]) -> list[Move[Write]]:
    """Return the moves between ranks; equal on all ranks. Pure.

    A box comes from the rank that needs it if that rank holds it, else from the holder that has
    sent the fewest bytes.

    Raises:
        ValueError: if names or shapes differ between the two, or owners' boxes leave holes.
    """
    boxes = _cover(held)
    shapes = {name: claim.shape for one in held for name, claim in one.items()}
    dtypes = {name: claim.dtype for one in held for name, claim in one.items()}
    names = {name for one in wanted for name in one}
    missing, unused = name_problems(names, list(boxes))
    problems = [f"not held by any rank: {text}" for text in missing]
    problems += [f"needed by no rank: {name}" for name in unused]
    problems += [
        f"{name}: held as {list(shapes[name])}, needed as {list(claim.shape)}"
        for one in wanted
        for name, claim in one.items()
        if name in shapes and claim.shape != shapes[name]
    ]
    if problems:
        raise ValueError(
            "cannot transfer weights: " + list_problems(list(dict.fromkeys(problems)))
        )
    moves: list[Move[Write]] = []
    sent = [0] * len(held)
    for name, holders in boxes.items():
        size = DTYPE_BYTES[dtypes[name]]
        for rank, one in enumerate(wanted):
            claim = one.get(name)
            for box in dict.fromkeys(claim.boxes) if claim else ():
                for held_box, ranks in holders.items():
                    part = intersect(box, held_box)
                    if part is None:
                        continue
                    sender = rank if rank in ranks else min(ranks, key=lambda r: (sent[r], r))
                    num_bytes = prod(part[1]) * size
                    sent[sender] += num_bytes if sender != rank else 0
                    moves.append(Move(sender, rank, num_bytes, Write(name, part)))
    return moves


def _cover(held: Sequence[Claims]) -> dict[str, dict[Box, list[int]]]:
    """Return the ranks that hold each box of each tensor; owners' boxes only.

    Raises:
        ValueError: if the owners' boxes leave holes or overlap.
    """
    boxes: dict[str, dict[Box, list[int]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for one in held:
        for name, claim in one.items():
            shapes[name] = claim.shape
            holders_of_box = boxes.setdefault(name, {})
            if claim.owner:
                holders_of_box |= {box: holders_of_box.get(box, []) for box in claim.boxes}
    for rank, one in enumerate(held):
        for name, claim in one.items():
            for box in dict.fromkeys(claim.boxes):
                if box in boxes[name]:
                    boxes[name][box].append(rank)
    problems = [
        f"{name}: {text}"
        for name, holders_of_box in boxes.items()
        for text in cover_problems(shapes[name], list(holders_of_box))
    ]
    if problems:
        raise ValueError("cannot transfer weights: " + list_problems(problems))
    return boxes


def _views(shard: Shard, box: Box) -> list[Tensor]:
    """Return the memory of a box in each piece that contains it."""
    views = []
    for piece in shard.pieces:
        if intersect(box, piece_box(piece)) == box:
            views.append(narrow_to_box(piece.data.detach(), shift_box(box, piece.offsets)))
    return views
