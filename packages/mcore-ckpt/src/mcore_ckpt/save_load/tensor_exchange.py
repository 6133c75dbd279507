"""Boxes of tensors moved between ranks, in rounds of bounded size.

Every rank has every move beforehand, from a plan, so only bytes travel: one all-to-all a
round. What stays on its rank is handed over without a copy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mcore_ckpt.save_load.rank_agreement import any_rank
from mcore_parallel.collectives import all_to_all
from mcore_parallel.mesh import Axis

Key = TypeVar("Key")

ROUND_BYTES = 1 << 28
"""Most bytes that a rank sends, and that it receives, in one round; one move may be larger."""

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Move(Generic[Key]):
    """A box that one rank has and another needs."""

    source: int
    """Rank that has it."""
    target: int
    """Rank that needs it."""
    num_bytes: int
    """Of the box."""
    key: Key
    """What it is, to those who give and take it."""

    @property
    def room_bytes(self) -> int:
        """Bytes that it takes up on the way, so that every box is aligned."""
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


def exchange(
    moves: Sequence[Move[Key]],
    give: Callable[[Key], Tensor],
    take: Callable[[Key, Tensor], None],
    *,
    world: Axis,
    device: torch.device,
    round_bytes: int = ROUND_BYTES,
) -> None:
    """Carry out moves; all ranks of ``world`` call it with the same list.

    Args:
        moves: in any order that is the same on all ranks.
        give: returns the box that this rank has; called where this rank is the source.
        take: gets the box, 1-D, bytes of the source's row-major order; called where this
            rank is the target. The memory is its own only until it returns.
        world: the ranks; one all-to-all of bytes over it a round.
        device: where bytes must be to travel over ``world``.
        round_bytes: bounds what is on the way.
    """
    for batch in rounds(moves, round_bytes):
        for move in batch:
            if move.source == move.target == world.rank:
                take(move.key, _bytes(give(move.key)))
        travelling = [move for move in batch if move.source != move.target]
        if travelling:
            _round(travelling, give, take, world, device)


def travel_device(tensors: Iterable[Tensor], world: Axis) -> torch.device:
    """Return where bytes travel: on the GPU if any rank's tensors are there; one all-reduce."""
    if any_rank([any(tensor.is_cuda for tensor in tensors)], world)[0]:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rounds(moves: Sequence[Move[Key]], round_bytes: int) -> Iterator[list[Move[Key]]]:
    """Cut moves, in order, into rounds in which no rank sends or receives too much. Pure."""
    batch: list[Move[Key]] = []
    load: dict[tuple[str, int], int] = {}
    for move in moves:
        ends = ("from", move.source), ("to", move.target)
        if batch and any(load.get(e, 0) + move.room_bytes > round_bytes for e in ends):
            yield batch
            batch, load = [], {}
        batch.append(move)
        for end in ends:
            load[end] = load.get(end, 0) + move.room_bytes
    if batch:
        yield batch


def _round(
    moves: Sequence[Move[Key]],
    give: Callable[[Key], Tensor],
    take: Callable[[Key, Tensor], None],
    world: Axis,
    device: torch.device,
) -> None:
    ranks = range(world.size)
    out = [[m for m in moves if m.source == world.rank and m.target == r] for r in ranks]
    come = [[m for m in moves if m.target == world.rank and m.source == r] for r in ranks]
    send = [sum(move.room_bytes for move in mine) for mine in out]
    receive = [sum(move.room_bytes for move in mine) for mine in come]
    packed = torch.empty(sum(send), dtype=torch.uint8, device=device)
    place = 0
    for move in (move for mine in out for move in mine):
        packed[place : place + move.num_bytes].copy_(_bytes(give(move.key)))
        place += move.room_bytes
    got = all_to_all(packed, world, send, receive)
    place = 0
    for move in (move for mine in come for move in mine):
        take(move.key, got[place : place + move.num_bytes])
        place += move.room_bytes


def _bytes(box: Tensor) -> Tensor:
    return box.detach().contiguous().reshape(-1).view(torch.uint8)
