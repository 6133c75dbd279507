"""Updates of optimizer state in host memory: gradients come and weights go under them.

The device's own memory holds nothing but gradients and weights. An update walks the state in
pieces: while the processor works on one, the gradients of the next are on their way to it, and
the weights of the one before on their way back, each on a stream of its own and through pinned
buffers. On a CPU there is nothing to copy, and the arithmetic is the same.

Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, section 6.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

PIECE = 1 << 24
"""Elements of one piece: their copy takes about a millisecond."""
_AHEAD = 2
"""Pieces whose gradients are fetched before they are needed, and buffers for them."""


class HostPiece(NamedTuple):
    """A range of state in host memory, and the device's memory that belongs to it."""

    main: Tensor
    """Main weights, on the host."""
    grad: Tensor
    """Gradients, on the device."""
    weights: Tensor
    """Weights, on the device: they become ``main`` in their own dtype."""


Update = Callable[[int, Tensor, Tensor], None]
"""``update(index, grad, weights)``: both on the host; weights may be the main weights."""


class HostUpdates:
    """Streams and pinned buffers for the pieces of one rank."""

    def __init__(self, device: torch.device, num_threads: int) -> None:
        """Make nothing yet.

        Args:
            device: where gradients and weights are.
            num_threads: of the processor for an update, this rank's share of the host.
        """
        self.device, self.num_threads = device, num_threads
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}

    @contextmanager
    def updating(self, pieces: Sequence[HostPiece]) -> Iterator["HostUpdate"]:
        """Fetch gradients inside, as they are needed; the host waits for the last weights."""
        before = torch.get_num_threads()
        torch.set_num_threads(max(before, self.num_threads))
        try:
            yield HostUpdate(self, pieces)
        finally:
            torch.set_num_threads(before)

    def streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the stream that fetches and the one that sends."""
        if self._streams is None:
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        return self._streams

    def buffer(self, kind: str, place: int, like: Tensor) -> Shaped[Tensor, " n"]:
        """Return pinned memory for a piece; pieces of one place share it."""
        key = kind, place % _AHEAD, like.dtype
        known = self._buffers.get(key)
        if known is None or known.numel() < like.numel():
            known = torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)
            self._buffers[key] = known
        return known[: like.numel()]


class HostUpdate:
    """One step's way through the pieces."""

    def __init__(self, owner: HostUpdates, pieces: Sequence[HostPiece]) -> None:
        self._owner, self._pieces = owner, pieces
        self._next = self._fetched = 0
        self._arriving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._sent: deque[torch.cuda.Event] = deque()
        if owner.device.type == "cuda":
            # Gradients are complete once what is queued until now is done.
            owner.streams()[0].wait_stream(torch.cuda.current_stream(owner.device))
            self._fetch()

    def apply(self, count: int, update: Update) -> None:
        """Update the next pieces; the current stream then waits for their weights."""
        for _ in range(count):
            place, piece = self._next, self._pieces[self._next]
            self._next += 1
            if self._owner.device.type != "cuda":
                update(place, piece.grad, piece.main)
                piece.weights.copy_(piece.main)
                continue
            grad, event = self._arriving.popleft()
            event.synchronize()
            weights = self._free_buffer(place, piece)
            update(place, grad, weights)
            self._fetch()
            self._send(piece, weights)
        if self._sent:
            torch.cuda.current_stream(self._owner.device).wait_event(self._sent[-1])

    def _free_buffer(self, place: int, piece: HostPiece) -> Tensor:
        """Return memory for rounded weights, once the piece before has left it."""
        if piece.weights.dtype == piece.main.dtype:
            return piece.main
        while len(self._sent) >= _AHEAD:
            self._sent.popleft().synchronize()
        return self._owner.buffer("weights", place, piece.weights)

    def _fetch(self) -> None:
        """Begin to fetch gradients into every buffer that is free."""
        stream = self._owner.streams()[0]
        while self._fetched < min(self._next + _AHEAD, len(self._pieces)):
            grad = self._pieces[self._fetched].grad
            buffer = self._owner.buffer("grad", self._fetched, grad)
            with torch.cuda.stream(stream):
                buffer.copy_(grad, non_blocking=True)
                event = torch.cuda.Event()
                event.record(stream)
            self._arriving.append((buffer, event))
            self._fetched += 1

    def _send(self, piece: HostPiece, weights: Tensor) -> None:
        stream = self._owner.streams()[1]
        # What still reads the weights on the device comes first.
        stream.wait_stream(torch.cuda.current_stream(self._owner.device))
        with torch.cuda.stream(stream):
            piece.weights.copy_(weights, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        self._sent.append(event)
