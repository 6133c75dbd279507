"""Moves boxes of tensors between ranks, in rounds of bounded size.

All ranks have the same list of moves, so that only data is sent, by one all-to-all a round. A
box whose source and target are one rank is passed on without communication.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mcore_ckpt.save_load.rank_agreement import any_rank
from mcore_parallel.collectives import all_to_all
from mcore_parallel.digests import digest
from mcore_parallel.mesh import Axis

Key = TypeVar("Key")

ROUND_BYTES = 1 << 28
"""Bound of the bytes that a rank sends, and receives, in one round; one move may be larger."""

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Move(Generic[Key]):
    """A box that one rank holds and another needs."""

    source: int
    """Rank that holds the box."""
    target: int
    """Rank that needs the box."""
    num_bytes: int
    """Bytes of the box."""
    key: Key
    """Identifies the box for ``give`` and ``take``."""

    @property
    def room_bytes(self) -> int:
        """Bytes in the send buffer, padded so that every box is aligned."""
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(slots=True)
class ExchangeDigests:
    """Digests of the bytes that a rank sent to, and received from, each rank."""

    sent: list[Tensor] = field(default_factory=list)
    """For each round, digests of the bytes sent to each rank of the axis."""
    received: list[Tensor] = field(default_factory=list)
    """For each round, digests of the bytes received from each rank."""

    def add(self, packed: Tensor, send: list[int], got: Tensor, receive: list[int]) -> None:
        """Compute the digests of one round; the host does not wait."""
        self.sent.append(torch.stack([digest(part) for part in packed.split(send)]))
        self.received.append(torch.stack([digest(part) for part in got.split(receive)]))

    def damaged(self, world: Axis) -> list[int]:
        """Return the ranks whose bytes changed on the way to this rank; one all-to-all."""
        if not self.sent:
            return []
        # [rounds, ranks] -> [ranks, rounds]: row r goes to rank r, which compares it.
        ones = [1] * world.size
        expected = all_to_all(torch.stack(self.sent, 1), world, ones, ones)
        differs = (expected != torch.stack(self.received, 1)).any(1)
        return differs.nonzero().flatten().tolist()


def exchange(
    moves: Sequence[Move[Key]],
    give: Callable[[Key], Tensor],
    take: Callable[[Key, Tensor], None],
    *,
    world: Axis,
    device: torch.device,
    round_bytes: int = ROUND_BYTES,
    digests: ExchangeDigests | None = None,
) -> None:
    """Execute moves; all ranks of ``world`` call it with the same list.

    Args:
        moves: boxes to move, in the same order on all ranks.
        give: returns a box of this rank; called on the source rank.
        take: receives the bytes of a box, 1-D, row-major; called on the target rank. ``take``
            must copy the bytes, as their memory is reused after it returns.
        world: the ranks; one all-to-all of bytes a round.
        device: device of the communication.
        round_bytes: bound of the bytes in flight.
        digests: collects digests of the bytes sent and received; None: no digests.
    """
    for batch in rounds(moves, round_bytes):
        for move in batch:
            if move.source == move.target == world.rank:
                take(move.key, _bytes(give(move.key)))
        remote = [move for move in batch if move.source != move.target]
        if remote:
            _round(remote, give, take, world, device, digests)


def travel_device(tensors: Iterable[Tensor], world: Axis) -> torch.device:
    """Return the GPU if any rank's tensors are on one, else the CPU; one all-reduce."""
    if any_rank([any(tensor.is_cuda for tensor in tensors)], world)[0]:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rounds(moves: Sequence[Move[Key]], round_bytes: int) -> Iterator[list[Move[Key]]]:
    """Split moves, in order, into rounds of bounded size for every rank. Pure."""
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
    digests: ExchangeDigests | None,
) -> None:
    # The send buffer holds the boxes by target rank, the receive buffer by source rank, both in
    # the order of `moves`: no rank needs to be told where a box lies.
    ranks = range(world.size)
    outgoing = [[m for m in moves if m.source == world.rank and m.target == r] for r in ranks]
    incoming = [[m for m in moves if m.target == world.rank and m.source == r] for r in ranks]
    send = [sum(move.room_bytes for move in of_rank) for of_rank in outgoing]
    receive = [sum(move.room_bytes for move in of_rank) for of_rank in incoming]
    packed = torch.empty(sum(send), dtype=torch.uint8, device=device)
    begin = 0
    for move in (move for of_rank in outgoing for move in of_rank):
        packed[begin : begin + move.num_bytes].copy_(_bytes(give(move.key)))
        begin += move.room_bytes
    received = all_to_all(packed, world, send, receive)
    if digests is not None:
        digests.add(packed, send, received, receive)
    begin = 0
    for move in (move for of_rank in incoming for move in of_rank):
        take(move.key, received[begin : begin + move.num_bytes])
        begin += move.room_bytes


def _bytes(box: Tensor) -> Tensor:
    return box.detach().contiguous().reshape(-1).view(torch.uint8)
