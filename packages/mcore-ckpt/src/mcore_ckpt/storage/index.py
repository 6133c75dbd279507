"""The index of a checkpoint: which box of which tensor stands where in which file.

JSON, so that anyone can read it and nothing in it can run. Chunks carry a CRC32 for each
block of bytes, so that a reader who needs a few rows checks only the blocks they lie in. The
last line is the digest of all before it.
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
"""Entry of ``extra`` in which a step of adapters says their rank and factor, and their base."""

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
"""Torch's word for each dtype that safetensors writes, by its name there."""

DTYPE_BYTES: dict[str, int] = {
    **dict.fromkeys(TORCH_WORDS, 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
}
"""Bytes of an element, by safetensors' name of the dtype."""


@dataclass(frozen=True, slots=True)
class StoredBox:
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
    chunks: tuple[StoredBox, ...]
    """Disjoint boxes that cover it."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a step."""

    num_bytes: int
    """Its size."""
    digest: str
    """Of its content; of a tensor file, whose data has checksums, of its header."""


@dataclass(frozen=True, slots=True)
class Index:
    """Everything a checkpoint says about itself."""

    tensors: Mapping[str, TensorEntry]
    """By name."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON of the caller who saved."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """Tensor files."""
    beside: Mapping[str, FileEntry] = field(default_factory=dict)
    """All other files of the step but the index, by their path within it."""

    def to_bytes(self, rows: Mapping[str, str] | None = None) -> bytes:
        """Return the text of ``index.json``: a tensor a line, readable and diffable.

        Args:
            rows: ``row_text`` by name, in place of ``tensors``.
        """
        head = {"format": FORMAT, "version": VERSION, "block_bytes": BLOCK_BYTES}
        head |= {"extra": dict(self.extra)}
        for key, files in (("files", self.files), ("beside", self.beside)):
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
    """Return the JSON of a tensor, of whose chunks there is ``chunk_text``."""
    return f'["{dtype}",{_shape_text(shape)},[{",".join(chunks)}]]'


def chunk_text(box: StoredBox) -> str:
    """Return the JSON of a box, in a fifth of the encoder's time: ten thousand are usual."""
    place = f"{_shape_text(box.offsets)},{_shape_text(box.lengths)}"
    checksums = ",".join(map(str, box.checksums))
    return f"[{json.dumps(box.file)},{box.offset},{place},[{checksums}]]"


@lru_cache(maxsize=4096)
def _shape_text(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def digest(content: bytes) -> str:
    """Return the BLAKE2b digest of some bytes, 16 bytes in hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def read_index(folder: str | Path) -> Index:
    """Read and check the index of a step folder; ``checksums.check_files`` checks the files.

    Raises:
        ValueError: if there is none, it is no index of ours, or another version's.
        CheckpointError: if it is damaged, or a tensor file is absent or has another size.
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
            f"{path} has version {table.get('version')}: this program reads {VERSION}. Use the "
            "mcore-ckpt that wrote it, or a newer one."
        )
    if content != _sealed(content.rpartition(_DIGEST)[0]):
        raise CheckpointError(f"{path} is damaged: its digest is that of other content.")
    try:
        tensors = {name: _entry(row) for name, row in table["tensors"].items()}
        files, beside = (
            {name: FileEntry(*one) for name, one in table[key].items()}
            for key in ("files", "beside")
        )
        index = Index(tensors, dict(table["extra"]), files, beside)
        _check_files(as_path(folder), index)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from None
    return index


def check_whole(folder: Path, index: Index) -> None:
    """Check that the boxes of each tensor have as many elements as its shape.

    A shape is not believed before: reading by rows makes lists as long as it says. Only steps
    of local disks, which hold a rank's part, are not whole.

    Raises:
        CheckpointError: naming the first tensor that is not.
    """
    for name, entry in index.tensors.items():
        held = sum(prod(chunk.lengths) for chunk in entry.chunks)
        if held != prod(entry.shape):
            raise CheckpointError(
                f"{folder / INDEX}: {name} of shape {list(entry.shape)} has {held} elements "
                "in files."
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
    for name in (*index.files, *index.beside):
        path_within(folder, name)
    for name, entry in index.tensors.items():
        if not {chunk.file for chunk in entry.chunks} <= index.files.keys():
            raise CheckpointError(f"{folder / INDEX}: {name} is in a file it does not name")
        size = DTYPE_BYTES[entry.dtype]
        for chunk in entry.chunks:
            if chunk.offset + prod(chunk.lengths) * size > index.files[chunk.file].num_bytes:
                raise CheckpointError(f"{folder / INDEX}: {name} ends outside of {chunk.file}")
    for name, file in index.files.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{folder / name} is missing: the index names it") from None
        if found != file.num_bytes:
            raise CheckpointError(
                f"{folder / name} has {found} bytes, not the {file.num_bytes} written"
            )
