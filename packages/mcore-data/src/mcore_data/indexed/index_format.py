"""The ``.idx`` file of Megatron's token datasets: layout, dtypes and checks.

All little-endian and packed: a 34-byte header (magic, version 1, dtype code, number of
sequences S, number of document borders), int32 [S] lengths, int64 [S] byte offsets,
int64 borders, and in multimodal files int8 [S] modes. ``read_index`` maps a file and checks
sizes, offsets and borders against each other and against the size of the file.
"""

import re
import struct
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mcore_base.stores import as_path

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CHUNK_ROWS = 1 << 20
_UINT16_VOCAB_LIMIT = 65500


class CorruptDatasetError(RuntimeError):
    """The files of a dataset are damaged or do not belong together."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Dtype that Megatron's writer uses for a vocabulary: uint16 below 65500, else int32."""
    return np.dtype("<u2") if vocab_size < _UINT16_VOCAB_LIMIT else np.dtype("<i4")


def bin_path(prefix: str | Path) -> Path:
    """Path of the tokens of dataset ``prefix``."""
    return as_path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Path of the index of dataset ``prefix``."""
    return as_path(f"{prefix}.idx")


def origins_path(prefix: str | Path) -> Path:
    """Path of the file that names the record of each document of dataset ``prefix``."""
    return as_path(f"{prefix}.origins")


def kept_path(prefix: str | Path) -> Path:
    """Path of the file with the kept values of each document of dataset ``prefix``."""
    return as_path(f"{prefix}.kept")


@dataclass(frozen=True, slots=True)
class IdxArrays:
    """Arrays of an ``.idx`` file, mapped, not copied.

    Attributes:
        dtype: dtype of the ``.bin``.
        lengths: int32 [S], tokens of each sequence.
        pointers: int64 [S], byte offset of each sequence in the ``.bin``.
        documents: int64 [documents + 1], borders: document j owns sequences
            ``documents[j]`` to ``documents[j + 1]``.
        modes: int8 [S] for multimodal files, else None.
    """

    dtype: np.dtype
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    documents: NDArray[np.int64]
    modes: NDArray[np.int8] | None


def hint_at_pairs(prefix: str | Path) -> str:
    """Return advice for an error message: which existing pair a wrong prefix may mean."""
    bare = re.sub(r"\.(bin|idx)$", "", str(prefix))
    if bare != str(prefix) and is_pair(bare):
        return f"A prefix goes without .bin and .idx: give {bare}."
    near = sorted(str(path)[: -len(".idx")] for path in map(Path, glob(f"{escape(bare)}*.idx")))
    near = [name for name in near if is_pair(name)]
    if near:
        return f"Did you mean {' or '.join(near[:3])}?"
    return "Give a prefix for which both .bin and .idx exist."


def is_pair(prefix: str | Path) -> bool:
    """Whether both files of a dataset exist."""
    return bin_path(prefix).is_file() and idx_path(prefix).is_file()


def read_index(path: str | Path) -> IdxArrays:
    """Map an ``.idx`` file and check it.

    A file is multimodal if its size includes a mode for each sequence.

    Raises:
        FileNotFoundError: if there is no such file.
        CorruptDatasetError: if magic, version, dtype, size, pointers or document borders
            are wrong.
    """
    path = Path(path)
    size = path.stat().st_size
    if size < HEADER.size:
        raise CorruptDatasetError(
            f"{path} is truncated: {size} bytes, the header alone takes {HEADER.size}. "
            "Write the dataset again."
        )
    buffer = np.memmap(path, dtype=np.uint8, mode="r")
    magic, version, code, num_sequences, num_borders = HEADER.unpack(
        buffer[: HEADER.size].tobytes()
    )
    if magic != MAGIC:
        raise CorruptDatasetError(
            f"{path} is not an index: it starts with {magic!r} instead of {MAGIC!r}. "
            "Give the prefix of a .bin/.idx pair."
        )
    if version != VERSION:
        raise CorruptDatasetError(
            f"{path} has index version {version}; only {VERSION} is known."
        )
    if code not in DTYPES:
        raise CorruptDatasetError(
            f"{path} has dtype code {code}; known codes are {sorted(DTYPES)}."
        )
    text_size = HEADER.size + 12 * num_sequences + 8 * num_borders
    if size not in (text_size, text_size + num_sequences):
        raise CorruptDatasetError(
            f"{path} does not fit its header: {num_sequences} sequences and {num_borders} "
            f"document borders take {text_size} bytes, the file has {size}. It is truncated "
            "or overwritten; write the dataset again."
        )
    pointers_offset = HEADER.size + 4 * num_sequences
    documents_offset = pointers_offset + 8 * num_sequences
    index = IdxArrays(
        dtype=DTYPES[code],
        lengths=np.frombuffer(buffer, "<i4", num_sequences, HEADER.size),
        pointers=np.frombuffer(buffer, "<i8", num_sequences, pointers_offset),
        documents=np.frombuffer(buffer, "<i8", num_borders, documents_offset),
        modes=(
            np.frombuffer(buffer, "i1", num_sequences, text_size) if size != text_size else None
        ),
    )
    _check_index(path, index)
    return index


def dtype_code(dtype: np.dtype) -> int:
    """Code of a dtype in the header."""
    for code, known in DTYPES.items():
        if known == dtype.newbyteorder("<"):
            return code
    raise ValueError(
        f"the format has no dtype {dtype}; use one of {[d.name for d in DTYPES.values()]}."
    )


def _check_index(path: Path, index: IdxArrays) -> None:
    """Check lengths, pointers and borders, in chunks to bound memory."""
    offset = 0
    for start in range(0, len(index.lengths), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        lengths = index.lengths[rows].astype(np.int64)
        ends = offset + np.cumsum(lengths) * index.dtype.itemsize
        wrong = (lengths < 0) | (index.pointers[rows] != ends - lengths * index.dtype.itemsize)
        if wrong.any():
            sequence = start + int(wrong.argmax())
            raise CorruptDatasetError(
                f"{path}: sequence {sequence} has length {index.lengths[sequence]} and byte "
                f"offset {index.pointers[sequence]}, which does not follow from the sequences "
                "before it. The index is damaged; write the dataset again."
            )
        offset = int(ends[-1])
    borders = index.documents
    ordered = len(borders) > 0 and bool((borders[1:] >= borders[:-1]).all())
    if not ordered or borders[0] != 0 or borders[-1] != len(index.lengths):
        raise CorruptDatasetError(
            f"{path}: the document borders must rise from 0 to {len(index.lengths)} sequences "
            "and do not. The index is damaged; write the dataset again."
        )
