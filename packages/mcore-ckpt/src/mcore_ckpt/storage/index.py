"""The index of a checkpoint: which box of which tensor stands where in which file.

JSON, so that anyone can read it and nothing in it can run. Chunks carry a CRC32 for each
block of bytes, so that a reader who needs a few rows checks only the blocks they lie in.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.storage.paths import INDEX
from mcore_ckpt.storage.stores import as_path

FORMAT = "mcore"
"""Value of ``format`` in an index."""

VERSION = 1
"""Version of the index; readers refuse a newer one."""

BLOCK_BYTES = 1 << 22
"""Bytes that share one checksum; the last block of a chunk is shorter."""

DTYPE_BYTES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}
"""Bytes of an element, by safetensors' name of the dtype."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor as it stands, row-major, in a file."""

    file: str
    """Name within the folder."""
    offset: int
    """First byte in the file."""
    offsets: tuple[int, ...]
    """Where the box begins in the tensor."""
    lengths: tuple[int, ...]
    """Size of the box."""
    checksums: tuple[int, ...] = ()
    """CRC32 of each block of ``BLOCK_BYTES``; empty: unknown, in foreign files alone."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A whole tensor of a checkpoint."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """Safetensors' name, ``BF16``."""
    chunks: tuple[Chunk, ...]
    """Disjoint boxes that cover it."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Index:
    """Everything a checkpoint says about itself."""

    tensors: Mapping[str, TensorEntry]
    """By name."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON that whoever saved wanted kept."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Tensor files and their sizes in bytes."""

    def to_bytes(self) -> bytes:
        """Return the text of ``index.json``: a tensor a line, readable and diffable."""
        head = {"format": FORMAT, "version": VERSION, "block_bytes": BLOCK_BYTES}
        head |= {"extra": dict(self.extra), "files": dict(self.files)}
        lines = json.dumps(head, indent=1)[:-2] + ',\n "tensors": {'
        rows = [
            f"\n  {json.dumps(name)}: " + json.dumps(_row(entry), separators=(",", ":"))
            for name, entry in sorted(self.tensors.items())
        ]
        return f"{lines}{','.join(rows)}\n }}\n}}\n".encode()


def read_index(folder: str | Path, *, is_whole: bool = True) -> Index:
    """Read and check the index of a step folder.

    Args:
        folder: the step.
        is_whole: boxes must cover every tensor; else, as in one rank's local checkpoint, they
            may cover a part of it.

    Raises:
        ValueError: if there is none, it is no index of ours, or a newer version's.
        CheckpointError: if it is damaged: not JSON, fields missing, a file that is absent or
            has another size, a chunk that reaches beyond its file or tensor, elements or
            checksums too few or too many.
    """
    path = as_path(folder) / INDEX
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no {INDEX}: it is no complete checkpoint.") from None
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f"{path} is not an index of the {FORMAT} format.")
    if table.get("version") != VERSION or table.get("block_bytes") != BLOCK_BYTES:
        raise ValueError(
            f"{path} has version {table.get('version')}: this program reads {VERSION}. "
            "Update mcore-ckpt."
        )
    try:
        tensors = {name: _entry(row) for name, row in table["tensors"].items()}
        index = Index(tensors, dict(table["extra"]), table["files"])
        _check_files(as_path(folder), index, is_whole)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from None
    return index


def _row(entry: TensorEntry) -> list[Any]:
    chunks = [[c.file, c.offset, c.offsets, c.lengths, c.checksums] for c in entry.chunks]
    return [entry.dtype, entry.shape, chunks]


def _entry(row: list[Any]) -> TensorEntry:
    dtype, shape, chunks = row
    return TensorEntry(
        tuple(shape),
        dtype,
        tuple(
            Chunk(file, offset, tuple(offsets), tuple(lengths), tuple(checksums))
            for file, offset, offsets, lengths, checksums in chunks
        ),
    )


def _check_files(folder: Path, index: Index, is_whole: bool) -> None:
    for name, size in index.files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{folder / INDEX} names {name}, outside its folder")
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{folder / name} is missing: the index names it") from None
        if found != size:
            raise CheckpointError(f"{folder / name} has {found} bytes, not the {size} written")
    for name, entry in index.tensors.items():
        _check_boxes(name, entry, is_whole)
        item = DTYPE_BYTES[entry.dtype]
        for chunk in entry.chunks:
            size = prod(chunk.lengths) * item
            end = chunk.offset + size
            if chunk.offset < 0 or end > index.files[chunk.file]:
                raise CheckpointError(
                    f"{folder / INDEX}: {name} reaches beyond {chunk.file} "
                    f"({end} of {index.files[chunk.file]} bytes)"
                )
            if len(chunk.checksums) != -(-size // BLOCK_BYTES):
                raise ValueError(
                    f"{name} has {len(chunk.checksums)} checksums for {size} bytes"
                )


def _check_boxes(name: str, entry: TensorEntry, is_whole: bool) -> None:
    """Check that boxes have the tensor's dimensions, bounds and volume.

    Overlaps take longer to find: who loads looks for them in what is wanted.
    """
    numbers = [*entry.shape]
    for chunk in entry.chunks:
        numbers += (chunk.offset, *chunk.offsets, *chunk.lengths)
        if not len(chunk.offsets) == len(chunk.lengths) == len(entry.shape):
            raise ValueError(f"{name} has a box without the {len(entry.shape)} dimensions")
        for start, length, size in zip(chunk.offsets, chunk.lengths, entry.shape, strict=True):
            if not 0 <= start <= start + length <= size or (is_whole and not length):
                raise ValueError(f"{name} has a box outside {list(entry.shape)}")
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"{name} has a size or a place that is no whole number")
    volume, whole = sum(prod(chunk.lengths) for chunk in entry.chunks), prod(entry.shape)
    fits = volume == whole if is_whole else volume <= whole
    if min(entry.shape, default=0) < 0 or not fits:
        raise ValueError(f"{name} of {list(entry.shape)} has {volume} elements in boxes")
