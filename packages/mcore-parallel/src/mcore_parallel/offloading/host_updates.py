"""Updates of optimizer state in host memory: pieces of it come to the GPU and go back.

Gradients and weights stay on the GPU. While it updates one piece, the next comes on a stream of
its own and the one before goes back on another, through a few sets of buffers that stay from
step to step. The update is that of state which lives there, so its bits are the same. Without
a GPU state is updated where it is.

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
"""What runs in order: copies to the GPU, its usual work, copies from it."""

_ALIGNMENT = 128
"""Of tensors in a buffer, in bytes: a line of a GPU's cache."""


@runtime_checkable
class Queues(Protocol):
    """Work of a device: in order within a queue, and beside other queues unless it waits."""

    def buffer(self, num_bytes: int) -> UInt8[Tensor, " b"]:
        """Return memory of the device, which work in ``update`` may still be using."""

    def copy(self, queue: Queue, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies between the host and the device."""

    def mark(self, queue: Queue) -> Any:
        """Return an event: all that is queued now is done."""

    def wait(self, queue: Queue, event: Any) -> None:
        """Let what is queued from now on begin after an event."""

    def wait_on_host(self, event: Any) -> None:
        """Return after an event."""


class CudaQueues:
    """``Queues`` of a GPU: two streams of its own beside the current one."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams."""
        self._device = device
        self._streams = {
            "fetch": torch.cuda.Stream(device),
            "send": torch.cuda.Stream(device),
        }

    def buffer(self, num_bytes: int) -> UInt8[Tensor, " b"]:
        """Return memory of the current stream."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, queue: Queue, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies; the host waits for those of memory that is not page-locked."""
        with torch.cuda.stream(self._stream(queue)):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    def mark(self, queue: Queue) -> Any:
        """Record an event."""
        return self._stream(queue).record_event()

    def wait(self, queue: Queue, event: Any) -> None:
        """Let a stream wait; the host does not."""
        self._stream(queue).wait_event(event)

    def wait_on_host(self, event: Any) -> None:
        """Let the host wait."""
        event.synchronize()

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        if queue == "update":
            return torch.cuda.current_stream(self._device)
        return self._streams[queue]


@dataclass(slots=True)
class _Set:
    """The device's memory of one piece at a time."""

    memory: Tensor
    is_free: Any
    """Event: what it held has left."""
    has_arrived: Any = None
    """Event: what it holds is complete."""


class HostUpdates:
    """The pieces of one rank, and the device's memory that they pass through."""

    def __init__(
        self,
        pieces: Sequence[Sequence[Shaped[Tensor, " _"]]],
        queues: Queues | None,
        read_ahead: Callable[..., None] | None = None,
    ) -> None:
        """Allocate the device's memory.

        Args:
            pieces: tensors in host memory that are updated together, in the order of updates.
            queues: of the device; None: the processor updates.
            read_ahead: called with the tensors of a piece some time before they are read.
        """
        self._pieces, self._queues, self._read_ahead = pieces, queues, read_ahead
        self._num_fetched = self._num_updated = 0
        self._sets: list[_Set] = []
        if queues is not None:
            size = max((_places(piece)[1] for piece in pieces), default=0)
            for _ in range(min(NUM_PIECES_ON_GPU, len(pieces))):
                self._sets.append(_Set(queues.buffer(size), queues.mark("update")))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Begin to fetch; after it host memory is current, for which alone the host waits.

        The first pieces come at once, beside what the device still has to do: they depend on
        nothing but the update before.
        """
        self._num_fetched = self._num_updated = 0
        self._fetch()
        yield
        assert self._num_updated == len(self._pieces)
        if self._queues is not None and self._sets:
            # They go back in order.
            last = self._sets[(self._num_updated - 1) % len(self._sets)]
            self._queues.wait_on_host(last.is_free)

    @contextmanager
    def next_piece(self) -> Iterator[Sequence[Shaped[Tensor, " n"]]]:
        """Yield the next piece where it is updated by what is queued; then it goes back."""
        piece = self._pieces[self._num_updated]
        if self._queues is None:
            self._announce(self._num_updated + 1)
            yield piece
            self._num_updated += 1
            return
        here = self._sets[self._num_updated % len(self._sets)]
        tensors = _tensors(here.memory, piece)
        self._queues.wait("update", here.has_arrived)
        yield tensors
        self._queues.wait("send", self._queues.mark("update"))
        self._queues.copy("send", piece, tensors)
        here.is_free = self._queues.mark("send")
        self._num_updated += 1
        self._fetch()

    def _fetch(self) -> None:
        """Queue the copies of pieces to every set whose piece is at least on its way back."""
        if self._queues is None:
            return
        stop = min(self._num_updated + len(self._sets), len(self._pieces))
        for place in range(self._num_fetched, stop):
            piece, here = self._pieces[place], self._sets[place % len(self._sets)]
            self._announce(place + 1)
            self._queues.wait("fetch", here.is_free)
            self._queues.copy("fetch", _tensors(here.memory, piece), piece)
            here.has_arrived = self._queues.mark("fetch")
            self._num_fetched = place + 1

    def _announce(self, place: int) -> None:
        if self._read_ahead is not None and place < len(self._pieces):
            self._read_ahead(*self._pieces[place])


def _places(piece: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where the tensors of a piece begin in a buffer, in bytes, and where they end."""
    begins, stop = [], 0
    for tensor in piece:
        begins.append(stop)
        stop += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
    return begins, stop


def _tensors(memory: Tensor, piece: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in a buffer that are like those of a piece."""
    return [
        memory[begin : begin + each.numel() * each.itemsize].view(each.dtype)
        for begin, each in zip(_places(piece)[0], piece, strict=True)
    ]
