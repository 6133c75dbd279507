"""Safetensors files as streams: a writer that holds one slab, a reader that reads rows.

Sizes are known in advance, so that the header is written first and then the bytes, directly
from the tensors' memory; checksums are computed while writing. (The safetensors library needs
all tensors of a file in memory at once.) Reads are positioned reads, which report a truncated
file as an error; a memory map would kill the process. Format:
https://huggingface.co/docs/safetensors (8 bytes of header length, little-endian, JSON padded
with spaces, data without gaps).
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from mcore_base.stores import StorePath, is_store
from mcore_ckpt.errors import CheckpointError, write_error
from mcore_ckpt.storage.boxes import Box, shift_box, small_spans, span, strides
from mcore_ckpt.storage.index import (
    BLOCK_BYTES,
    DTYPE_BYTES,
    TORCH_WORDS,
    FileEntry,
    StoredBox,
    TensorEntry,
    digest,
)

DTYPES: dict[str, torch.dtype] = {n: getattr(torch, word) for n, word in TORCH_WORDS.items()}
"""Torch's dtype of each name that safetensors writes."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""Safetensors' name of each dtype that it can write."""

_ALIGNMENT = 64

SLAB_BYTES = 4 * BLOCK_BYTES
"""Bytes that are copied at once from tensors that are not contiguous on the CPU."""


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to write, whose bytes are computed in slabs while the file is written."""

    name: str
    """Key in the file."""
    dtype: str
    """Safetensors' name."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    slabs: Callable[[], Iterable[Tensor]]
    """Yields contiguous CPU tensors whose concatenated bytes are the tensor's."""
    sections: tuple[int, ...] = ()
    """Bytes of each part with separate checksums; a slab must end at the end of each part.
    Empty: the tensor is one part."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written and is durable."""

    entry: FileEntry
    """Size of the file and digest of its header."""
    sections: list[WrittenTensor]
    """One entry for each item, or for each section of an item with sections, in file order."""


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """Offset and checksums of a tensor, or a section of one, in a file."""

    offset: int
    """First byte in the file."""
    checksums: tuple[int, ...]
    """CRC32 of each block of ``BLOCK_BYTES``."""


def write_file(
    path: Path, items: Sequence[Item], metadata: Mapping[str, str] | None = None
) -> WrittenFile:
    """Write a safetensors file and make it durable.

    Args:
        path: the file, which must not exist.
        items: tensors in file order; wide dtypes first keep every tensor aligned.
        metadata: strings for the header.

    Raises:
        ValueError: if a name occurs twice.
        CheckpointError: if the disk fails, or an item's slabs do not have the bytes of its
            shape.
    """
    header, first = _header(items, metadata)
    try:
        with path.open("xb", buffering=1 << 20) as file:
            file.write(header)
            written = _write_items(file.write, items, first, path)
            if not is_store(path):
                file.flush()
                os.fsync(file.fileno())
    except FileExistsError:
        raise
    except OSError as error:
        path.unlink(missing_ok=True)
        raise write_error(path, error) from error
    size = len(header) + sum(item.num_bytes for item in items)
    return WrittenFile(FileEntry(size, digest(header)), written)


def cut_slabs(tensor: Shaped[Tensor, ...]) -> Iterator[Tensor]:
    """Yield a tensor's bytes in row-major order, uncopied if it is contiguous on the CPU.

    Otherwise slabs of up to ``SLAB_BYTES`` are copied, from a GPU into pinned memory.
    """
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield tensor
        return
    box = ((0,) * tensor.dim(), tuple(tensor.shape))
    for offsets, lengths in small_spans(
        tuple(tensor.shape), box, max(1, SLAB_BYTES // tensor.element_size())
    ):
        slab = torch.empty(lengths, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        yield slab.copy_(narrow_to_box(tensor, (offsets, lengths)))


def memory(tensor: Shaped[Tensor, ...]) -> memoryview:
    """Return a writable view of the bytes of a contiguous CPU tensor."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # pyrefly: ignore[bad-argument-type] - before 3.12


class Checksums:
    """Computes the CRC32 of each block of ``BLOCK_BYTES`` of a stream of bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._done: list[int] = []
        self._current = 0

    def update(self, data: memoryview) -> None:
        """Add the next bytes."""
        while len(data):
            room = BLOCK_BYTES - self.num_bytes % BLOCK_BYTES
            part, data = data[:room], data[room:]
            self._current = zlib.crc32(part, self._current)
            self.num_bytes += len(part)
            if self.num_bytes % BLOCK_BYTES == 0:
                self._done.append(self._current)
                self._current = 0

    def finish(self) -> tuple[int, ...]:
        """Return the checksums; the last block may be short."""
        return tuple(self._done + ([self._current] if self.num_bytes % BLOCK_BYTES else []))


class Reader:
    """Reads regions of tensors from the files of one folder; keeps files open until closed.

    Several threads may read at once.
    """

    def __init__(self, folder: Path, *, checksums: bool = True) -> None:
        """Prepare a reader; files are opened at their first read.

        Args:
            folder: folder of the files that chunks name.
            checksums: verify blocks that are read.
        """
        self._folder = folder
        self._checksums = checksums
        self._files: dict[Path, int] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def read(
        self, name: str, entry: TensorEntry, chunk: StoredBox, box: Box, target: Tensor
    ) -> None:
        """Read a region of a chunk into ``target``; casts if the dtypes differ.

        Only blocks that contain rows of the region are read.

        Args:
            name: name of the tensor, for messages.
            entry: entry of the tensor in the index.
            chunk: one of the tensor's chunks.
            box: region of the tensor, inside the chunk.
            target: tensor of the region's shape; any strides, any device.

        Raises:
            CheckpointError: if a block does not have its checksum, or the file ends early.
        """
        dtype = DTYPES[entry.dtype]
        inside = shift_box(box, chunk.offsets)
        size = DTYPE_BYTES[entry.dtype]
        for part in small_spans(chunk.lengths, inside, SLAB_BYTES // size):
            view = narrow_to_box(target, shift_box(part, inside[0]))
            # Bytes of the chunk that span the part. Read directly if they need no verification
            # and have the layout of the target; otherwise read complete blocks and copy.
            first, stop = (end * size for end in span(chunk.lengths, part))
            if _lies_alike(view, dtype, stop - first) and self._needs_no_more(
                entry, chunk, first, stop
            ):
                self._read_bytes(name, chunk, first, memory(view))
                continue
            start = first // BLOCK_BYTES * BLOCK_BYTES
            end = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, prod(chunk.lengths) * size)
            # Copies from pinned memory to a GPU are several times as fast; torch reuses the
            # pinned memory for the next slab.
            blocks = torch.empty(end - start, dtype=torch.uint8, pin_memory=view.is_cuda)
            self._read_bytes(name, chunk, start, memory(blocks))
            flat = blocks[first - start : stop - start].view(dtype)
            view.copy_(flat.as_strided(part[1], strides(chunk.lengths)))

    def _needs_no_more(
        self, entry: TensorEntry, chunk: StoredBox, first: int, stop: int
    ) -> bool:
        """Whether a range of bytes consists of complete blocks, or checksums are off."""
        if not self._checksums or not chunk.checksums:
            return True
        total = prod(chunk.lengths) * DTYPE_BYTES[entry.dtype]
        return first % BLOCK_BYTES == 0 and (stop % BLOCK_BYTES == 0 or stop == total)

    def _read_bytes(self, name: str, chunk: StoredBox, start: int, target: memoryview) -> None:
        """Read and verify bytes into ``target`` from ``start``, a block boundary."""
        path = self._folder / chunk.file
        if isinstance(path, StorePath):
            begin = chunk.offset + start
            content = path.read_range(begin, begin + len(target))
            if len(content) != len(target):
                raise CheckpointError(f"{path} ends within {name}: the object was cut short.")
            target[:] = content
            self._check(name, chunk, start, target, path)
            return
        done = 0
        while done < len(target):
            try:
                count = os.preadv(
                    self._open(path), [target[done:]], chunk.offset + start + done
                )
            except OSError as error:
                # Not an OSError, which callers would attribute to the file that they write.
                raise CheckpointError(f"cannot read {path}: {error}.") from error
            if not count:
                raise CheckpointError(f"{path} ends within {name}: the file was cut short.")
            done += count
        self._check(name, chunk, start, target, path)

    def _open(self, path: Path) -> int:
        with self._opening:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
            return self._files[path]

    def _check(
        self, name: str, chunk: StoredBox, start: int, target: memoryview, path: Path
    ) -> None:
        if not self._checksums or not chunk.checksums:
            return
        for begin in range(0, len(target), BLOCK_BYTES):
            block = (start + begin) // BLOCK_BYTES
            if zlib.crc32(target[begin : begin + BLOCK_BYTES]) != chunk.checksums[block]:
                raise CheckpointError(
                    f"{path} is damaged: the checksum of {name} differs from the saved one "
                    f"(bytes from {chunk.offset + block * BLOCK_BYTES}). Load another step."
                )


def _header(items: Sequence[Item], metadata: Mapping[str, str] | None) -> tuple[bytes, int]:
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for item in items:
        if item.name in table:
            raise ValueError(f"{item.name} occurs twice in one file: names must differ.")
        end = offset + item.num_bytes
        table[item.name] = {
            "dtype": item.dtype,
            "shape": list(item.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, 8 + len(text)


def _write_items(
    put: Callable[[memoryview], object], items: Sequence[Item], offset: int, path: Path
) -> list[WrittenTensor]:
    written = []
    for item in items:
        sections = item.sections or (item.num_bytes,)
        done: list[WrittenTensor] = []
        checksums = Checksums()
        for slab in item.slabs():
            data = memory(slab)
            put(data)
            checksums.update(data)
            if len(done) < len(sections) and checksums.num_bytes == sections[len(done)]:
                done.append(WrittenTensor(offset, checksums.finish()))
                offset += checksums.num_bytes
                checksums = Checksums()
        if checksums.num_bytes or sum(sections[len(done) :]):
            raise CheckpointError(
                f"{path}: the slabs of {item.name} have "
                f"{sum(sections[: len(done)]) + checksums.num_bytes} bytes, its shape "
                f"{item.num_bytes}"
            )
        # An item without elements may have no slabs.
        done += [WrittenTensor(offset, ())] * (len(sections) - len(done))
        written += done
    return written


def _lies_alike(target: Tensor, dtype: torch.dtype, num_bytes: int) -> bool:
    """Whether bytes of the file can be read directly into the target's memory."""
    return (
        target.device.type == "cpu"
        and target.dtype == dtype
        and target.is_contiguous()
        and target.numel() * target.element_size() == num_bytes
    )


def narrow_to_box(tensor: Tensor, box: Box) -> Tensor:
    """Return the view of a tensor at a box."""
    for dim, (offset, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
