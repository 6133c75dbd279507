"""Updates optimizer state in host memory: the GPU fetches, updates and returns it in pieces.

Gradients and weights stay on the GPU. While the GPU updates one piece, a second stream fetches
the next piece and a third returns the previous one, through a few sets of buffers that persist
between steps. The update code is that of state on the GPU, so results are bitwise equal.
Without a GPU, state is updated in host memory.

Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, section 6.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from mcore_parallel.offloading.config import NUM_PIECES_ON_GPU

Queue = Literal["fetch", "update", "send"]
"""Ordered queues of a device: copies to the GPU, computation, copies from the GPU."""

_ALIGNMENT = 128
"""Alignment of tensors in a buffer, in bytes: a cache line of a GPU."""


@runtime_checkable
class Queues(Protocol):
    """Asynchronous work of a device: in order within a queue, concurrent between queues."""

    def buffer(self, num_bytes: int) -> UInt8[Tensor, " b"]:
        """Allocate device memory, which earlier work in ``update`` may still use."""

    def copy(self, queue: Queue, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies between host and device."""

    def mark(self, queue: Queue) -> Any:
        """Return an event that completes when all work queued so far is done."""

    def wait(self, queue: Queue, event: Any) -> None:
        """Make later work in a queue wait for an event."""

    def wait_on_host(self, event: Any) -> None:
        """Block the host until an event."""


class CudaQueues:
    """``Queues`` of a GPU: the current stream and two more streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {
            "fetch": torch.cuda.Stream(device),
            "send": torch.cuda.Stream(device),
        }

    def buffer(self, num_bytes: int) -> UInt8[Tensor, " b"]:
        """Allocate memory on the current stream."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, queue: Queue, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies; the host waits for copies of memory that is not page-locked."""
        with torch.cuda.stream(self._stream(queue)):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    def mark(self, queue: Queue) -> Any:
        """Record an event."""
        return self._stream(queue).record_event()

    def wait(self, queue: Queue, event: Any) -> None:
        """Make a stream wait for an event."""
        self._stream(queue).wait_event(event)

    def wait_on_host(self, event: Any) -> None:
        """Block the host until an event."""
        event.synchronize()

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        if queue == "update":
            return torch.cuda.current_stream(self._device)
        return self._streams[queue]


@dataclass(slots=True)
class _Set:
    """Device buffers for one piece at a time, with the events of their reuse."""

    memory: Tensor
    is_free: Any
    """Event: the previous piece has been returned to the host."""
    has_arrived: Any = None
    """Event: the current piece has been fetched."""


class HostUpdates:
    """Optimizer state of one rank in host memory, and device buffers for updating it."""

    def __init__(
        self,
        pieces: Sequence[Sequence[Shaped[Tensor, " _"]]],
        queues: Queues | None,
        read_ahead: Callable[..., None] | None = None,
    ) -> None:
        """Allocate the device buffers.

        Args:
            pieces: groups of tensors in host memory that are updated together, in order.
            queues: queues of the device; None: the CPU updates in host memory.
            read_ahead: called with the tensors of a piece some time before they are read.
        """
        self._pieces, self._queues, self._read_ahead = pieces, queues, read_ahead
        self._num_fetched = self._num_updated = 0
        self._sets: list[_Set] = []
        if queues is not None:
            size = max((_offsets(piece)[1] for piece in pieces), default=0)
            for _ in range(min(NUM_PIECES_ON_GPU, len(pieces))):
                self._sets.append(_Set(queues.buffer(size), queues.mark("update")))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Enclose one update of all pieces by ``next_piece``.

        At entry the fetches of the first pieces are launched; they overlap with queued work of
        the device. At exit the host waits until all pieces are back in host memory.
        """
        self._num_fetched = self._num_updated = 0
        self._fetch()
        yield
        assert self._num_updated == len(self._pieces)
        if self._queues is not None and self._sets:
            # Pieces are returned in order, so the last one is enough.
            last = self._sets[(self._num_updated - 1) % len(self._sets)]
            self._queues.wait_on_host(last.is_free)

    @contextmanager
    def next_piece(self) -> Iterator[Sequence[Shaped[Tensor, " n"]]]:
        """Yield the next piece on the device, to be updated in place; then send it back."""
        piece = self._pieces[self._num_updated]
        if self._queues is None:
            self._announce(self._num_updated + 1)
            yield piece
            self._num_updated += 1
            return
        buffers = self._sets[self._num_updated % len(self._sets)]
        tensors = _tensors(buffers.memory, piece)
        self._queues.wait("update", buffers.has_arrived)
        yield tensors
        self._queues.wait("send", self._queues.mark("update"))
        self._queues.copy("send", piece, tensors)
        buffers.is_free = self._queues.mark("send")
        self._num_updated += 1
        self._fetch()

    def _fetch(self) -> None:
        """Queue fetches to every buffer whose previous piece is queued for return."""
        if self._queues is None:
            return
        stop = min(self._num_updated + len(self._sets), len(self._pieces))
        for index in range(self._num_fetched, stop):
            piece, buffers = self._pieces[index], self._sets[index % len(self._sets)]
            self._announce(index + 1)
            self._queues.wait("fetch", buffers.is_free)
            self._queues.copy("fetch", _tensors(buffers.memory, piece), piece)
            buffers.has_arrived = self._queues.mark("fetch")
            self._num_fetched = index + 1

    def _announce(self, index: int) -> None:
        if self._read_ahead is not None and index < len(self._pieces):
            self._read_ahead(*self._pieces[index])


def _offsets(piece: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the byte offsets of a piece's tensors in a buffer, and the buffer's size."""
    begins, stop = [], 0
    for tensor in piece:
        begins.append(stop)
        stop += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
    return begins, stop


def _tensors(memory: Tensor, piece: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a buffer with the sizes and dtypes of a piece's tensors."""
    return [
        memory[begin : begin + each.numel() * each.itemsize].view(each.dtype)
        for begin, each in zip(_offsets(piece)[0], piece, strict=True)
    ]
