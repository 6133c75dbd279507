"""Reads token files in an object store (``s3://``, ``gs://``, ...) by ranges through fsspec.

The small ``.idx`` is copied once into a local folder and mapped. Of the ``.bin`` only the
blocks that samples need are requested, and the last blocks used are kept in memory.
"""

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_base.atomic_files import write_durably
from mcore_base.stores import object_version, open_store
from mcore_data.indexed.index_format import CorruptDatasetError

_BLOCK_BYTES = 4 << 20
_BLOCKS_KEPT = 16


def is_remote(prefix: str) -> bool:
    """Whether a prefix is the address of an object store."""
    return "://" in prefix


def fetch_index(prefix: str, cache_path: str | Path) -> Path:
    """Copy ``<prefix>.idx`` into a local folder unless a copy exists; returns its path.

    Any number of processes may call at once. The name of the copy is a hash of the address and
    of the file's size and version in the store, so a file that was replaced is fetched again.

    Raises:
        ValueError: if no folder is given.
        FileNotFoundError: if the store does not have the file.
        ImportError: if fsspec or the store's package is missing.
    """
    if not cache_path:
        raise ValueError(
            f"{prefix} is in an object store: give --object-storage-cache-path, a local folder "
            "for its index."
        )
    system, path = _open_file(f"{prefix}.idx")
    state = system.info(path)
    version = f"{prefix} {state['size']} {object_version(state)}"
    name = hashlib.sha256(version.encode()).hexdigest()[:32]
    local = Path(cache_path) / f"{name}.idx"
    if not local.is_file():
        local.parent.mkdir(parents=True, exist_ok=True)
        write_durably(local, system.cat_file(path))
    return local


class StoreBin:
    """Tokens of a ``.bin`` in an object store, block by block."""

    def __init__(self, prefix: str, dtype: np.dtype) -> None:
        self._system, self._path = _open_file(f"{prefix}.bin")
        self._dtype = dtype
        self.size_bytes = int(self._system.info(self._path)["size"])
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def read(self, start_bytes: int, count: int) -> NDArray[Any]:
        """Read ``count`` tokens from a byte on."""
        stop = start_bytes + count * self._dtype.itemsize
        if stop > self.size_bytes:
            raise CorruptDatasetError(f"{self._path} ends at byte {self.size_bytes}.")
        blocks = range(start_bytes // _BLOCK_BYTES, -(-stop // _BLOCK_BYTES))
        held = b"".join(self._block(number) for number in blocks)
        first = start_bytes - blocks.start * _BLOCK_BYTES
        return np.frombuffer(held[first : first + stop - start_bytes], self._dtype)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            start = number * _BLOCK_BYTES
            stop = min(start + _BLOCK_BYTES, self.size_bytes)
            self._blocks[number] = self._system.cat_file(self._path, start=start, end=stop)
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return self._blocks[number]


def _open_file(address: str) -> tuple[Any, str]:
    system, path = open_store(address)
    if not system.exists(path):
        raise FileNotFoundError(
            f"{address} does not exist. Give a prefix for which both .bin and .idx exist."
        )
    return system, path
