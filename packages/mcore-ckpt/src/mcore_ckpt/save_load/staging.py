"""Host memory that a save in the background writes from, while training goes on.

Copies from a GPU run on a stream of their own into pinned blocks, beside the kernels of the
next step; copies of CPU tensors are made by whoever writes. The owner of the tensors calls
``hold`` right before it changes them, and no sooner. Blocks are kept from save to save: the
memory needed is one rank's share, once.
"""

import logging
import threading
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.storage.boxes import Box, small_spans
from mcore_ckpt.storage.files import narrowed

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 28
"""Size of a block. A power of two: torch's pinned allocator rounds up to one."""

_PART_BYTES = 1 << 26
_ALIGNMENT = 64


class Copies:
    """Tensors on their way to the host."""

    def __init__(
        self, sources: list[Tensor], parts: list[list[Tensor]], event: torch.cuda.Event | None
    ) -> None:
        self.parts = parts
        """Of each tensor, contiguous host tensors: one after the other they are its bytes,
        once ``finish`` has returned."""
        self._sources = sources
        self._event = event
        self._done = threading.Event()

    def hold(self) -> None:
        """Make what changes the tensors next wait for the copies.

        For GPU tensors the current stream waits, not the host.
        """
        if self._event is None:
            self._done.wait()
        elif not self._event.query():
            torch.cuda.current_stream().wait_event(self._event)

    def finish(self) -> None:
        """Wait until the bytes are on the host; makes the copies of CPU tensors.

        May run in a thread; only the first call does anything.
        """
        if self._done.is_set():
            return
        try:
            if self._event is None:
                _copy(self._sources, self.parts)
            else:
                self._event.synchronize()
        finally:
            self._sources = []
            self._done.set()


class Staging:
    """Blocks of host memory, pinned where copies come from a GPU; only ever grows."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._parts: list[list[Tensor]] = []
        self._stream: torch.cuda.Stream | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return sum(block.numel() for block in self._blocks)

    def start(self, tensors: Sequence[Tensor]) -> Copies:
        """Begin to copy tensors; what was copied before is overwritten.

        Args:
            tensors: any strides. GPU tensors may change after ``hold``, CPU tensors beside
                GPU tensors at once.

        Raises:
            CheckpointError: if the host has no room.
        """
        sources = list(tensors)
        on_gpu = any(tensor.is_cuda for tensor in sources)
        layout = [(tensor.shape, tensor.dtype) for tensor in sources]
        if layout != self._layout:
            self._parts = self._lay_out(sources, pinned=on_gpu)
            self._layout = layout
        if not on_gpu:
            return Copies(sources, self._parts, None)
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy(sources, self._parts)
        event = torch.cuda.Event()
        event.record(self._stream)
        return Copies(sources, self._parts, event)

    def _lay_out(self, tensors: Sequence[Tensor], *, pinned: bool) -> list[list[Tensor]]:
        """Give every tensor places in the blocks, in parts that leave few gaps."""
        number, place = 0, 0
        placed: list[list[Tensor]] = []
        for tensor in tensors:
            mine = []
            for _, lengths in _cuts(tensor):
                size = prod(lengths) * tensor.element_size()
                if place + size > self._size(number) and place:
                    number, place = number + 1, 0
                block = self._block(number, size, pinned=pinned)
                flat = block[place : place + size].view(tensor.dtype)
                mine.append(flat.view(lengths))
                place += -(-size // _ALIGNMENT) * _ALIGNMENT
            placed.append(mine)
        return placed

    def _size(self, number: int) -> int:
        return self._blocks[number].numel() if number < len(self._blocks) else BLOCK_BYTES

    def _block(self, number: int, size: int, *, pinned: bool) -> Tensor:
        if number == len(self._blocks):
            size = max(size, BLOCK_BYTES if pinned else _PART_BYTES)
            try:
                block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            except RuntimeError as error:
                raise CheckpointError(
                    f"no room for a save in the background: {self.num_bytes / 2**30:.1f} GiB "
                    "of host memory are taken, and more is needed. Leave --async-save out."
                ) from error
            self._blocks.append(block)
        return self._blocks[number]


def _cuts(tensor: Tensor) -> list[Box]:
    """Cut a tensor into boxes that lie in its row-major order, of bounded size."""
    whole = ((0,) * tensor.dim(), tuple(tensor.shape))
    if not tensor.numel():
        return [whole]
    return list(small_spans(whole[1], whole, max(1, _PART_BYTES // tensor.element_size())))


def _copy(sources: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> None:
    for source, mine in zip(sources, parts, strict=True):
        if len(mine) == 1:
            mine[0].copy_(source, non_blocking=True)
            continue
        for box, part in zip(_cuts(source), mine, strict=True):
            part.copy_(narrowed(source, box), non_blocking=True)
