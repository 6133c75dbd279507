"""The index of a checkpoint: file and offset of each stored box of each tensor.

The index is JSON, which is readable and cannot run code. Chunks have a CRC32 for each block of
bytes, so that reading a few rows verifies only their blocks. The last line is the digest of the
text before it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from mcore_base.stores import as_path
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.storage.paths import INDEX, path_within

FORMAT = "mcore"
"""Value of ``format`` in an index."""

VERSION = 2
"""Version of the index; readers refuse a newer one."""

ADAPTER = "peft"
"""Key of ``extra`` with rank, factor and base model of a step of adapters."""

BLOCK_BYTES = 1 << 22
"""Bytes that share one checksum; the last block of a chunk is shorter."""

_DIGEST = b',\n "digest": "'

TORCH_WORDS: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
"""Torch's name of each dtype that safetensors writes, by safetensors' name."""

DTYPE_BYTES: dict[str, int] = {
    **dict.fromkeys(TORCH_WORDS, 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
}
"""Bytes of an element, by safetensors' name of the dtype."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, stored row-major in a file."""

    file: str
    """Name within the folder."""
    offset: int
    """First byte in the file."""
    offsets: tuple[int, ...]
    """Offsets of the box in the tensor."""
    lengths: tuple[int, ...]
    """Size of the box."""
    checksums: tuple[int, ...] = ()
    """CRC32 of each block of ``BLOCK_BYTES``; empty in files of other programs."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A complete tensor of a checkpoint."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """Safetensors' name, ``BF16``."""
    chunks: tuple[StoredBox, ...]
    """Disjoint boxes that cover the tensor."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and digest of a file of a step."""

    num_bytes: int
    """Size of the file."""
    digest: str
    """Digest of the content, or of the header of a tensor file, whose data has checksums."""


@dataclass(frozen=True, slots=True)
class Index:
    """Tensors, files and extra data of a checkpoint."""

    tensors: Mapping[str, TensorEntry]
    """By name."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON given by the caller of the save."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """Tensor files."""
    small_files: Mapping[str, FileEntry] = field(default_factory=dict)
    """All other files of the step except the index, by path within it; ``beside`` in JSON."""

    def to_bytes(self, rows: Mapping[str, str] | None = None) -> bytes:
        """Return the text of ``index.json``, with one line for each tensor.

        Args:
            rows: ``row_text`` of each tensor by name; replaces ``tensors``.
        """
        head = {"format": FORMAT, "version": VERSION, "block_bytes": BLOCK_BYTES}
        head |= {"extra": dict(self.extra)}
        for key, files in (("files", self.files), ("beside", self.small_files)):
            head[key] = {name: [one.num_bytes, one.digest] for name, one in files.items()}
        lines = json.dumps(head, indent=1)[:-2] + ',\n "tensors": {'
        if rows is None:
            rows = {
                name: row_text(entry.dtype, entry.shape, map(chunk_text, entry.chunks))
                for name, entry in self.tensors.items()
            }
        table = ",".join(f"\n  {json.dumps(name)}: {rows[name]}" for name in sorted(rows))
        return _sealed(f"{lines}{table}\n }}".encode())


def row_text(dtype: str, shape: tuple[int, ...], chunks: Iterable[str]) -> str:
    """Return the JSON of a tensor from the ``chunk_text`` of its chunks."""
    return f'["{dtype}",{_shape_text(shape)},[{",".join(chunks)}]]'


def chunk_text(box: StoredBox) -> str:
    """Return the JSON of a box, five times as fast as the json module does."""
    box_lists = f"{_shape_text(box.offsets)},{_shape_text(box.lengths)}"
    checksums = ",".join(map(str, box.checksums))
    return f"[{json.dumps(box.file)},{box.offset},{box_lists},[{checksums}]]"


@lru_cache(maxsize=4096)
def _shape_text(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def digest(content: bytes) -> str:
    """Return the BLAKE2b digest of bytes, 16 bytes in hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def read_index(folder: str | Path) -> Index:
    """Read and check the index of a step folder; ``checksums.check_files`` checks the files.

    Raises:
        ValueError: if there is no index of this format and version.
        CheckpointError: if the index is damaged, or a tensor file is missing or has another
            size.
    """
    path = as_path(folder) / INDEX
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"{folder} holds no {INDEX}: it is not a complete checkpoint."
        ) from None
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f"{path} is not an index of the {FORMAT} format.")
    if table.get("version") != VERSION or table.get("block_bytes") != BLOCK_BYTES:
        raise ValueError(
            f"{path} has version {table.get('version')}: this program reads {VERSION}. Use the "
            "mcore-ckpt that wrote it, or a newer one."
        )
    if content != _sealed(content.rpartition(_DIGEST)[0]):
        raise CheckpointError(f"{path} is damaged: its digest differs from its content.")
    try:
        tensors = {name: _entry(row) for name, row in table["tensors"].items()}
        files, small_files = (
            {name: FileEntry(*one) for name, one in table[key].items()}
            for key in ("files", "beside")
        )
        index = Index(tensors, dict(table["extra"]), files, small_files)
        _check_files(as_path(folder), index)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from None
    return index


def check_whole(folder: Path, index: Index) -> None:
    """Check that the boxes of each tensor have as many elements as its shape.

    Call it before reading by rows, which makes lists as long as a shape states. Only steps on
    local disks, which hold one rank's shards, are incomplete.

    Raises:
        CheckpointError: with the name of the first tensor whose boxes are incomplete.
    """
    for name, entry in index.tensors.items():
        num_stored = sum(prod(chunk.lengths) for chunk in entry.chunks)
        if num_stored != prod(entry.shape):
            raise CheckpointError(
                f"{folder / INDEX}: {name} of shape {list(entry.shape)} has {num_stored} "
                "elements in files."
            )


def _sealed(content: bytes) -> bytes:
    return content + _DIGEST + digest(content).encode() + b'"\n}\n'


def _entry(row: list[Any]) -> TensorEntry:
    dtype, shape, chunks = row
    return TensorEntry(
        tuple(shape),
        dtype,
        tuple(
            StoredBox(file, offset, tuple(offsets), tuple(lengths), tuple(checksums))
            for file, offset, offsets, lengths, checksums in chunks
        ),
    )


def _check_files(folder: Path, index: Index) -> None:
    for name in (*index.files, *index.small_files):
        path_within(folder, name)
    for name, entry in index.tensors.items():
        if not {chunk.file for chunk in entry.chunks} <= index.files.keys():
            raise CheckpointError(
                f"{folder / INDEX} is damaged: {name} is in a file that it does not list."
            )
        size = DTYPE_BYTES[entry.dtype]
        for chunk in entry.chunks:
            if chunk.offset + prod(chunk.lengths) * size > index.files[chunk.file].num_bytes:
                raise CheckpointError(
                    f"{folder / INDEX} is damaged: {name} ends outside of {chunk.file}."
                )
    for name, file in index.files.items():
        try:
            actual_bytes = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder / name} is missing, but the index lists it."
            ) from None
        if actual_bytes != file.num_bytes:
            raise CheckpointError(
                f"{folder / name} has {actual_bytes} bytes, but {file.num_bytes} were written."
            )
