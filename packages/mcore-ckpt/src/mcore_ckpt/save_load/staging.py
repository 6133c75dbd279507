"""Copies tensors to host memory, from which a background save writes while training continues.

Copies from a GPU run on a separate stream into pinned blocks, concurrently with kernels of the
next step; the writing thread copies CPU tensors. The owner of the tensors calls ``hold`` right
before changing them. Blocks are kept between saves and hold one copy of a rank's share.

Neighbours in one storage, such as stacked experts or moments in a bucket, are copied together,
so that the number of copies is about that of blocks rather than tensors: a launch costs 10 us,
and after about a thousand queued launches the caller waits for the device.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.storage.boxes import Box, small_spans
from mcore_ckpt.storage.files import narrow_to_box

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 28
"""Size of a block; a power of two, since torch's pinned allocator rounds up to one."""

_SMALL_BLOCK_BYTES = 1 << 26
_ALIGNMENT = 64
_PART_BYTES = _SMALL_BLOCK_BYTES - _ALIGNMENT
"""Largest part: it fits into any block at any alignment."""

_GAP_BYTES = 1 << 12
"""Largest gap between two tensors of a storage that are copied together."""


class Copies:
    """Copies of tensors to the host, in progress or finished."""

    def __init__(
        self,
        moves: list[tuple[Tensor, Tensor]],
        parts: list[list[Tensor]],
        event: torch.cuda.Event | None,
    ) -> None:
        self.parts = parts
        """For each tensor, contiguous host tensors whose concatenation holds its bytes once
        ``finish`` has returned."""
        self._moves = moves
        self._event = event
        self._done = threading.Event()

    def hold(self) -> None:
        """Make later changes of the tensors wait for the copies.

        For GPU tensors the current stream waits, not the host.
        """
        if self._event is None:
            self._done.wait()
        elif not self._event.query():
            torch.cuda.current_stream().wait_event(self._event)

    def finish(self) -> None:
        """Copy CPU tensors, or wait for the copies of GPU tensors to arrive on the host.

        May run in a thread; repeated calls have no effect.
        """
        if self._done.is_set():
            return
        try:
            if self._event is None:
                _copy(self._moves)
            else:
                self._event.synchronize()
        finally:
            self._moves = []
            self._done.set()


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor, or a box of a tensor, that is copied in one piece."""

    number: int
    """Position of the tensor in the list to copy."""
    box: Box
    """Region of the tensor, contiguous in row-major order."""
    num_bytes: int
    storage: int = 0
    """Address of the storage; 0: the tensor is copied separately."""
    address: int = 0
    """Address of the first byte; 0: copied separately."""


@dataclass(slots=True)
class _Run:
    """Memory copied at once: neighbours in a storage, or one strided part."""

    first: _Part
    """First part of the run."""
    block: int
    """Number of the target block."""
    place: int
    """Position of the first byte in the block."""
    num_bytes: int


class Staging:
    """Blocks of host memory, pinned for copies from a GPU; they only grow."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._layout: list[tuple[int, torch.Size, tuple[int, ...], torch.dtype]] = []
        self._runs: list[_Run] = []
        self._parts: list[list[Tensor]] = []
        self._stream: torch.cuda.Stream | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that are allocated."""
        return sum(block.numel() for block in self._blocks)

    def start(self, tensors: Sequence[Tensor]) -> Copies:
        """Start copying tensors to the host; overwrites the previous copies.

        Args:
            tensors: tensors of any strides. GPU tensors may change after ``hold``; CPU tensors
                saved with GPU tensors may change at once.

        Raises:
            CheckpointError: if host memory is exhausted.
        """
        sources = list(tensors)
        on_gpu = any(tensor.is_cuda for tensor in sources)
        if not (self._lie_as_before(sources) and self._fits(sources)):
            self._lay_out(sources, pinned=on_gpu)
            self._layout = [(_address(t), t.shape, t.stride(), t.dtype) for t in sources]
        moves = [self._move(run, sources[run.first.number]) for run in self._runs]
        if not on_gpu:
            return Copies(moves, self._parts, None)
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy(moves)
        event = torch.cuda.Event()
        event.record(self._stream)
        return Copies(moves, self._parts, event)

    def _lie_as_before(self, sources: Sequence[Tensor]) -> bool:
        """Whether the previous layout fits: equal shapes, strides, dtypes and addresses."""
        return len(sources) == len(self._layout) and all(
            address in (0, t.data_ptr())
            and (t.shape, t.stride(), t.dtype) == (shape, stride, dtype)
            for t, (address, shape, stride, dtype) in zip(sources, self._layout, strict=True)
        )

    def _fits(self, sources: Sequence[Tensor]) -> bool:
        """Whether the tensors of each run are still neighbours in one storage."""
        storages = [(run, sources[run.first.number].untyped_storage()) for run in self._runs]
        return all(
            run.first.address + run.num_bytes <= storage.data_ptr() + storage.nbytes()
            for run, storage in storages
            if run.first.address
        )

    def _lay_out(self, tensors: Sequence[Tensor], *, pinned: bool) -> None:
        """Assign each part a position in the blocks; neighbours form a run."""
        parts = [part for number, one in enumerate(tensors) for part in _parts(number, one)]
        parts.sort(key=lambda part: (part.storage, part.address))
        self._runs, self._parts = [], [[] for _ in tensors]
        run = _Run(_Part(0, ((), ()), 0), 0, 0, 0)
        for part in parts:
            # A part that follows the run keeps its distance to the run's first byte. Any other
            # part starts at the next aligned byte, with its address modulo the alignment.
            if is_next := _is_next(part, run):
                place = run.place + part.address - run.first.address
            else:
                place = _aligned(run.place + run.num_bytes) + part.address % _ALIGNMENT
            has_room = place + part.num_bytes <= self._size(run.block)
            if not (is_next and has_room):
                block = run.block if has_room else run.block + 1
                place = place if has_room else part.address % _ALIGNMENT
                run = _Run(part, block, place, 0)
                self._runs.append(run)
            end = place + part.num_bytes
            run.num_bytes = end - run.place
            memory = self._block(run.block, end, pinned=pinned)[place:end]
            tensor = tensors[part.number]
            self._parts[part.number].append(memory.view(tensor.dtype).view(part.box[1]))

    def _move(self, run: _Run, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return source and target of a run's copy."""
        target = self._blocks[run.block][run.place : run.place + run.num_bytes]
        if not run.first.address:
            box = run.first.box
            return narrow_to_box(tensor, box), target.view(tensor.dtype).view(box[1])
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        begin = run.first.address - storage.data_ptr()
        flat.set_(storage, begin, (run.num_bytes,), (1,))
        return flat, target

    def _size(self, number: int) -> int:
        return self._blocks[number].numel() if number < len(self._blocks) else BLOCK_BYTES

    def _block(self, number: int, size: int, *, pinned: bool) -> Tensor:
        if number == len(self._blocks):
            size = max(size, BLOCK_BYTES if pinned else _SMALL_BLOCK_BYTES)
            try:
                block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            except RuntimeError as error:
                raise CheckpointError(
                    f"host memory is exhausted by a background save, which holds "
                    f"{self.num_bytes / 2**30:.1f} GiB and needs more: leave --async-save out."
                ) from error
            self._blocks.append(block)
        return self._blocks[number]


def _parts(number: int, tensor: Tensor) -> list[_Part]:
    """Split a tensor into contiguous parts of bounded size, in row-major order."""
    size = tensor.element_size()
    whole = ((0,) * tensor.dim(), tuple(tensor.shape))
    boxes = [whole]
    if tensor.numel():
        boxes = list(small_spans(whole[1], whole, max(1, _PART_BYTES // size)))
    address = _address(tensor)
    storage = tensor.untyped_storage().data_ptr() if address else 0
    parts = []
    for box in boxes:
        num_bytes = prod(box[1]) * size
        parts.append(_Part(number, box, num_bytes, storage, address))
        address += num_bytes if storage else 0
    return parts


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor that may have neighbours; 0: it is copied separately.

    A tensor that fills its storage, such as a random state that each save reads again, has no
    neighbours, and may move between saves without a new layout.
    """
    address, size = tensor.data_ptr(), tensor.element_size()
    is_alone = tensor.numel() * size == tensor.untyped_storage().nbytes()
    return 0 if is_alone or not tensor.is_contiguous() or address % size else address


def _is_next(part: _Part, run: _Run) -> bool:
    """Whether a part follows a run in the same storage, with at most a small gap."""
    gap = part.address - run.first.address - run.num_bytes
    return 0 < part.storage == run.first.storage and 0 <= gap <= _GAP_BYTES


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _copy(moves: Sequence[tuple[Tensor, Tensor]]) -> None:
    for source, target in moves:
        target.copy_(source, non_blocking=True)
