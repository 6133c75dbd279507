"""Reads token sequences from Megatron's ``.bin``/``.idx`` pairs.

``<prefix>.bin`` holds the tokens, little-endian, of one dtype; ``<prefix>.idx`` holds the
offset and length of each sequence. Opening a pair checks that both files match, so a damaged
pair raises an error and never returns wrong tokens. Tokens are read by memory map, by plain
file reads or, for an address such as ``s3://bucket/prefix``, from an object store. The tokens
of a logical dataset (see ``manifest.py``) are read from the ``.bin`` files that its manifest
lists.
"""

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.indexed.index_format import (
    CorruptDatasetError,
    IdxArrays,
    bin_path,
    hint_at_pairs,
    idx_path,
    read_index,
)
from mcore_data.indexed.manifest import logical_bins, manifest_path, read_manifest
from mcore_data.indexed.object_store import (
    StoreBins,
    address_of,
    fetch_file,
    is_remote,
)

_OPEN_BINS = 256  # the usual limit of a process is 1024 open files


class IndexedDataset:
    """Sequences of tokens in a pair or logical dataset, read by memory map or by file.

    ``dataset[i]`` is sequence i, ``dataset[a:b]`` a list of neighbours, ``get`` a range of
    one sequence. Arrays returned from a memory map are read-only views. A pickled dataset
    holds the prefix and options only, so each loader process opens the files itself.

    Args:
        prefix: path without ``.bin`` or ``.idx``.
        mmap: map the ``.bin`` (default); False reads it with one call per sequence, for
            file systems on which maps are slow.
        cache_path: local folder for the indices of prefixes in object stores.
        cache_bytes: largest number of bytes of tokens in this folder; 0 caches no tokens.
        blocked: bool [S], sequences that no sample may contain (``blocklist.py``). Only
            datasets of samples use it; this class returns all tokens.

    Raises:
        FileNotFoundError: if the ``.bin`` or the ``.idx`` is missing.
        CorruptDatasetError: if a file is damaged or the two do not match.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        mmap: bool = True,
        cache_path: str | Path = "",
        cache_bytes: int = 0,
        blocked: NDArray[np.bool_] | None = None,
    ) -> None:
        self.blocked = blocked
        self.prefix = address_of(prefix)
        self.mmap = mmap
        self.cache_path = str(cache_path)
        self.cache_bytes = cache_bytes
        self._bin: _MappedBin | _FileBin | _LogicalBin | StoreBins
        if is_remote(self.prefix):
            self._open_remote()
            return
        bins = logical_bins(prefix, {} if bin_path(prefix).is_file() else read_manifest(prefix))
        for path in (idx_path(prefix), *([] if bins else [bin_path(prefix)])):
            if not path.is_file():
                raise FileNotFoundError(f"{path} does not exist. {hint_at_pairs(prefix)}")
        self.index = read_index(idx_path(prefix))
        if bins:
            self._bin = _LogicalBin(manifest_path(prefix), bins, self.index.dtype, mmap)
            _check_pair(self.prefix, self.index, self._bin.size_bytes)
            return
        _check_pair(self.prefix, self.index, bin_path(prefix).stat().st_size)
        self._bin = (_MappedBin if mmap else _FileBin)(bin_path(prefix), self.index.dtype)

    def _open_remote(self) -> None:
        self.index = read_index(fetch_file(self.prefix, ".idx", self.cache_path))
        facts = {} if bin_path(self.prefix).is_file() else read_manifest(self.prefix)
        bins = logical_bins(self.prefix, facts)
        addresses = {address_of(path): file["bytes"] for path, file in bins.items()}
        bins = StoreBins(
            addresses or {f"{self.prefix}.bin": None},
            self.index.dtype,
            self.cache_path,
            self.cache_bytes,
        )
        _check_pair(self.prefix, self.index, bins.size_bytes)
        self._bin = bins

    @property
    def dtype(self) -> np.dtype:
        """Element type of the stored tokens."""
        return self.index.dtype

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, int32 [S]."""
        return self.index.lengths

    @property
    def documents(self) -> NDArray[np.int64]:
        """Document borders, int64 [documents + 1]."""
        return self.index.documents

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.index.documents) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.index.lengths.sum(dtype=np.int64))

    def __len__(self) -> int:
        return len(self.index.lengths)

    def __getitem__(self, key: int | slice) -> Any:
        """Return the tokens of a sequence, or a list of sequences for a slice of step 1.

        Multimodal files give ``(tokens, mode)`` instead of tokens.
        """
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise ValueError(f"dataset[{start}:{stop}:{step}]: only step 1 can be read.")
            return [self[i] for i in range(start, stop)]
        tokens = self.get(key)
        if self.index.modes is None:
            return tokens
        return tokens, int(self.index.modes[key])

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return the tokens ``offset`` to ``offset + length`` of a sequence; None: to its end.

        Raises:
            IndexError: if the sequence does not exist.
            ValueError: if the range exceeds the sequence.
        """
        if not -len(self) <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)} in {self.prefix}")
        available = int(self.index.lengths[sequence])
        count = available - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > available:
            raise ValueError(
                f"tokens {offset} to {offset + count} are not in sequence {sequence} of "
                f"{self.prefix}, which has {available}."
            )
        start = int(self.index.pointers[sequence]) + offset * self.dtype.itemsize
        return self._bin.read(start, count)

    def locate(self, byte: int) -> tuple[Path | str, int]:
        """Return the file with a byte of the tokens, and the byte's position in this file."""
        if isinstance(self._bin, (_LogicalBin, StoreBins)):
            return self._bin.locate(byte)
        return bin_path(self.prefix), byte

    def chunks(self, num_tokens: int = 1 << 23) -> Iterator[NDArray[Any]]:
        """Yield all tokens in the order of the file, ``num_tokens`` at a time."""
        total, size = self.num_tokens, self.dtype.itemsize
        for start in range(0, total, num_tokens):
            yield self._bin.read(start * size, min(num_tokens, total - start))

    def gather(
        self,
        sequences: NDArray[np.integer],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> NDArray[Any]:
        """Concatenate ranges of many sequences, in the stored dtype; the result is read-only.

        Args:
            sequences: which sequences, [P].
            offsets: first token of each range, [P].
            lengths: tokens of each range, [P].
        """
        size = self.dtype.itemsize
        starts = self.index.pointers[sequences] + offsets * size
        byte_ranges = zip(starts.tolist(), (starts + lengths * size).tolist(), strict=True)
        if isinstance(self._bin, _MappedBin):
            # Joining bytes costs far less per range than joining numpy arrays.
            view = self._bin.view
            parts = [view[start:stop] for start, stop in byte_ranges]
        elif isinstance(self._bin, StoreBins):
            parts = self._bin.read_ranges(list(byte_ranges))
        else:
            read = self._bin.read
            parts = [read(start, (stop - start) // size) for start, stop in byte_ranges]
        return np.frombuffer(b"".join(parts), self.dtype)  # pyrefly: ignore[bad-argument-type]

    def __reduce__(self) -> tuple[Any, ...]:
        options = self.mmap, self.cache_path, self.cache_bytes, self.blocked
        return _reopen, (self.prefix, *options)


class _MappedBin:
    """Tokens through a memory map."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._dtype = dtype
        empty = path.stat().st_size == 0
        self._buffer = b"" if empty else np.memmap(path, dtype=np.uint8, mode="r")
        self.view = memoryview(self._buffer)  # pyrefly: ignore[bad-argument-type]

    def read(self, start_bytes: int, count: int) -> NDArray[Any]:
        return np.frombuffer(self._buffer, self._dtype, count, start_bytes if count else 0)


class _FileBin:
    """Tokens read by ``pread``, without a file position: safe in threads and after a fork."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path = path
        self._dtype = dtype
        self._file = path.open("rb", buffering=0)

    def read(self, start_bytes: int, count: int) -> NDArray[Any]:
        num_bytes = count * self._dtype.itemsize
        data = bytearray()
        while len(data) < num_bytes:
            chunk = os.pread(
                self._file.fileno(), num_bytes - len(data), start_bytes + len(data)
            )
            if not chunk:
                raise CorruptDatasetError(f"{self._path} ends at byte {start_bytes}.")
            data += chunk
        return np.frombuffer(data, self._dtype)

    def __del__(self) -> None:
        self._file.close()


class _LogicalBin:
    """Tokens of concatenated ``.bin`` files; opens each file when it is first read."""

    def __init__(
        self,
        manifest: Path,
        bins: Mapping[Path, Mapping[str, Any]],
        dtype: np.dtype,
        mmap: bool,
    ) -> None:
        self._manifest = manifest
        self._paths = list(bins)
        self._ends = np.cumsum([file["bytes"] for file in bins.values()], dtype=np.int64)
        self.size_bytes = int(self._ends[-1])
        self._dtype = dtype
        self._kind = _MappedBin if mmap else _FileBin
        # A file that the cache drops stays mapped until its last array is freed.
        self._opened = lru_cache(_OPEN_BINS)(self._open)

    def locate(self, byte: int) -> tuple[Path, int]:
        number = self._number(byte)
        return self._paths[number], byte - self._begin(number)

    def read(self, start_bytes: int, count: int) -> NDArray[Any]:
        size = self._dtype.itemsize
        parts = []
        while count > 0:
            number = self._number(start_bytes)
            length = min(count, (int(self._ends[number]) - start_bytes) // size)
            part = self._opened(number).read(start_bytes - self._begin(number), length)
            parts.append(part)
            start_bytes, count = start_bytes + length * size, count - length
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self._dtype)

    def _number(self, byte: int) -> int:
        number = int(np.searchsorted(self._ends, byte, side="right"))
        return min(number, len(self._paths) - 1)  # an empty range may start at the end

    def _begin(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0

    def _open(self, number: int) -> "_MappedBin | _FileBin":
        path = self._paths[number]
        expected = int(self._ends[number]) - self._begin(number)
        actual = path.stat().st_size if path.is_file() else None
        if actual != expected:
            state = "is missing" if actual is None else f"has {actual} bytes"
            raise CorruptDatasetError(
                f"{path} {state}, and {self._manifest} lists it with {expected} bytes. Restore "
                "the file, or write the unit again and repeat the merge."
            )
        return self._kind(path, self._dtype)


def _reopen(
    prefix: str,
    mmap: bool,
    cache_path: str,
    cache_bytes: int,
    blocked: NDArray[np.bool_] | None,
) -> IndexedDataset:
    return IndexedDataset(
        prefix, mmap=mmap, cache_path=cache_path, cache_bytes=cache_bytes, blocked=blocked
    )


def _check_pair(prefix: str, index: IdxArrays, actual: int) -> None:
    """Check that the ``.bin`` has exactly the bytes that the index describes."""
    expected = 0
    if len(index.lengths):
        expected = int(index.pointers[-1]) + int(index.lengths[-1]) * index.dtype.itemsize
    if actual != expected:
        raise CorruptDatasetError(
            f"{idx_path(prefix)} does not match {bin_path(prefix)}: the index describes "
            f"{expected} bytes of {index.dtype.name}, the .bin has {actual}. One of the two is "
            "truncated or from another run; write the dataset again."
        )
