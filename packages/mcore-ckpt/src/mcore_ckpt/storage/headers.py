"""Headers of safetensors files: which tensor stands where.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, little-endian, JSON
padded with spaces, data without gaps).
"""

import json
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.storage.index import StoredBox, TensorEntry

_MAX_HEADER_BYTES = 100_000_000


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read what a safetensors file holds, each tensor as one chunk without checksums."""
    size = path.stat().st_size
    header = read_header_bytes(path)
    try:
        table = json.loads(header[8:])
        table.pop("__metadata__", None)
        entries = {
            name: _header_entry(path, row, len(header), size) for name, row in table.items()
        }
        _check_gaps(list(entries.values()), len(header), size)
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{path} is no sound safetensors file: its header is damaged."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no sound safetensors file: {error}") from None
    return entries


def read_header_bytes(path: Path) -> bytes:
    """Read the header of a safetensors file, its 8 bytes of length included."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        count = int.from_bytes(length, "little")
        if size < 8 or count > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is no safetensors file: it has no header.")
        return length + file.read(count)


def _check_gaps(entries: list[TensorEntry], first: int, size: int) -> None:
    """Check that the tensors' data fills the file, as the format requires."""
    for entry in sorted(entries, key=lambda entry: (entry.chunks[0].offset, entry.num_bytes)):
        if entry.chunks[0].offset != first:
            raise ValueError(f"data has a gap or overlaps at byte {first}.")
        first += entry.num_bytes
    if first != size:
        raise ValueError(f"{size - first} bytes follow the last tensor.")


def _header_entry(path: Path, row: dict[str, Any], first: int, size: int) -> TensorEntry:
    shape, (begin, end) = tuple(row["shape"]), row["data_offsets"]
    entry = TensorEntry(
        shape, row["dtype"], (StoredBox(path.name, first + begin, (0,) * len(shape), shape),)
    )
    if end - begin != entry.num_bytes or begin < 0:
        raise ValueError(
            f"bytes {begin} to {end} are no {row['dtype']} of shape {list(shape)}."
        )
    if first + end > size:
        raise ValueError(
            f"it has {size} bytes, and its tensors need {first + end} or more: "
            "copy or download it again."
        )
    return entry
