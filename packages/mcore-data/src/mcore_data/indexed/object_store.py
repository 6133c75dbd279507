"""Pairs in an object store (``s3://``, ``gs://``, ...): reads by ranges, and uploads.

The small files of a pair are copied once into a local folder. Of the ``.bin`` files only the
blocks that samples need are requested, all blocks of a batch at once. The most recently used
blocks are kept in memory, and with ``cache_bytes`` all blocks on a local disk, from which the
oldest are removed. The loader's processes prefetch batches, each with its own requests.
"""

import contextlib
import hashlib
import logging
import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_base.atomic_files import write_durably
from mcore_base.stores import StorePath, as_path, object_version, open_store
from mcore_data.indexed.index_format import CorruptDatasetError

log = logging.getLogger(__name__)

_BLOCK_BYTES = 256 << 10
_BLOCKS_KEPT = 256
_PER_FOLDER = 1000
_CHECKED_SHARE = 20  # the cache's size is measured each time 1/20 of its limit was written
_REPORT_EVERY_S = 60.0


def is_remote(prefix: str | Path) -> bool:
    """Whether a prefix is the address of an object store."""
    return isinstance(prefix, StorePath) or "://" in str(prefix)


def address_of(path: str | Path) -> str:
    """Return a path as text; a path in an object store as a URL."""
    return path.url if isinstance(path, StorePath) else str(path)


def fetch_file(prefix: str, suffix: str, cache_path: str | Path) -> Path:
    """Copy ``<prefix><suffix>`` into a local folder unless a copy exists; return its path.

    Any number of processes may call this at once. The name of the copy is a hash of the address
    and of the file's size and version in the store, so a replaced file is fetched again.

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
    system, path, state = _find(f"{prefix}{suffix}")
    version = f"{prefix} {state['size']} {object_version(state)}"
    name = hashlib.sha256(version.encode()).hexdigest()[:32]
    local = Path(cache_path) / f"{name}{suffix}"
    if not local.is_file():
        local.parent.mkdir(parents=True, exist_ok=True)
        write_durably(local, system.cat_file(path))
    return local


def upload_files(local_prefix: str | Path, prefix: str | Path, suffixes: Iterable[str]) -> None:
    """Copy files of a pair to a store, in the order of their suffixes.

    A file that does not exist locally is removed from the store. An object is visible only once
    it is complete, so a reader recognizes a complete pair by the file that is copied last.
    """
    for suffix in suffixes:
        local, remote = Path(f"{local_prefix}{suffix}"), as_path(f"{prefix}{suffix}")
        assert isinstance(remote, StorePath)
        if local.is_file():
            remote.system.put_file(str(local), remote.key)
        else:
            remote.unlink(missing_ok=True)
        remote.system.invalidate_cache()


@dataclass(slots=True)
class Traffic:
    """Reads of one process from one dataset.

    Attributes:
        memory_blocks: blocks found in memory.
        disk_blocks: blocks found in the cache on disk.
        fetched_blocks: blocks requested from the store.
        fetched_bytes: bytes of the requested blocks.
        waited_s: seconds that reads waited for the store.
    """

    memory_blocks: int = 0
    disk_blocks: int = 0
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    waited_s: float = 0.0


class StoreBins:
    """Tokens of concatenated ``.bin`` files in an object store, read block by block.

    Args:
        addresses: size of each file by its address; a single file may have size None.
        dtype: dtype of the tokens.
        cache_path: local folder for blocks.
        cache_bytes: largest number of bytes of blocks on disk; 0 disables the disk cache.
    """

    def __init__(
        self,
        addresses: Mapping[str, int | None],
        dtype: np.dtype,
        cache_path: str | Path,
        cache_bytes: int,
    ) -> None:
        self._addresses = list(addresses)
        sizes, version = [size or 0 for size in addresses.values()], ""
        if None in addresses.values():
            _, _, state = _find(self._addresses[0])
            sizes, version = [int(state["size"])], object_version(state)
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self.size_bytes = int(self._ends[-1])
        self._dtype = dtype
        self._memory: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._disk = None
        if cache_bytes:
            names = f"{self._addresses} {sizes} {version}"
            folder = hashlib.sha256(names.encode()).hexdigest()[:32]
            self._disk = _BlockCache(Path(cache_path) / "blocks", folder, cache_bytes)
        self.traffic = Traffic()
        self._reported = (time.monotonic(), Traffic())

    def read(self, start_bytes: int, count: int) -> NDArray[Any]:
        """Read ``count`` tokens that start at a byte."""
        size = self._dtype.itemsize
        parts = []
        while count > 0:
            number = self._number(start_bytes)
            length = min(count, (int(self._ends[number]) - start_bytes) // size)
            if length <= 0:
                raise CorruptDatasetError(
                    f"{self._addresses[-1]} ends at byte {self.size_bytes}."
                )
            parts += self.read_ranges([(start_bytes, start_bytes + length * size)])
            start_bytes, count = start_bytes + length * size, count - length
        return np.frombuffer(b"".join(parts), self._dtype)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read ranges of bytes; no range may cross the end of a file.

        All blocks that are not cached are requested at once.
        """
        parts = []
        step = _BLOCKS_KEPT // 2
        for first in range(0, len(ranges), step):
            group = [self._within(start, stop) for start, stop in ranges[first : first + step]]
            keys = {
                (number, block): None
                for number, start, stop in group
                for block in range(start // _BLOCK_BYTES, -(-stop // _BLOCK_BYTES))
            }
            blocks = self._blocks(list(keys))
            for number, start, stop in group:
                inner = range(start // _BLOCK_BYTES, -(-stop // _BLOCK_BYTES))
                data = b"".join([blocks[number, block] for block in inner])
                begin = start - inner.start * _BLOCK_BYTES
                parts.append(data[begin : begin + stop - start])
        self._report()
        return parts

    def locate(self, byte: int) -> tuple[str, int]:
        """Return the address of the file with a byte, and the byte's position in the file."""
        number, start, _ = self._within(byte, byte)
        return self._addresses[number], start

    def _number(self, byte: int) -> int:
        number = int(np.searchsorted(self._ends, byte, side="right"))
        return min(number, len(self._addresses) - 1)

    def _within(self, start: int, stop: int) -> tuple[int, int, int]:
        number = self._number(start)
        begin = int(self._ends[number - 1]) if number else 0
        return number, start - begin, stop - begin

    def _blocks(self, keys: Sequence[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
        """Return blocks from memory, from the disk, or from the store."""
        blocks: dict[tuple[int, int], bytes] = {}
        for key in keys:
            data = self._memory.get(key)
            if data is not None:
                self._memory.move_to_end(key)
                self.traffic.memory_blocks += 1
            elif self._disk and (data := self._disk.read(key)) is not None:
                self.traffic.disk_blocks += 1
            if data is not None:
                blocks[key] = data
        missing = [key for key in keys if key not in blocks]
        if missing:
            blocks |= self._fetch(missing)
        for key, data in blocks.items():
            self._memory[key] = data
        while len(self._memory) > _BLOCKS_KEPT:
            self._memory.popitem(last=False)
        return blocks

    def _fetch(self, keys: Sequence[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
        # Opened again for each use: after a fork, fsspec returns another file system, with its
        # own threads and connections.
        system = open_store(self._addresses[0])[0]
        paths = [open_store(self._addresses[number])[1] for number, _ in keys]
        starts = [block * _BLOCK_BYTES for _, block in keys]
        sizes = np.diff(self._ends, prepend=0)
        stops = [
            min(start + _BLOCK_BYTES, int(sizes[number]))
            for start, (number, _) in zip(starts, keys, strict=True)
        ]
        began = time.monotonic()
        fetched = system.cat_ranges(paths, starts, stops, on_error="raise")
        self.traffic.waited_s += time.monotonic() - began
        for key, data, start, stop in zip(keys, fetched, starts, stops, strict=True):
            if len(data) != stop - start:
                raise CorruptDatasetError(
                    f"{self._addresses[key[0]]} ends before byte {stop}: it is not the file "
                    "that the index describes. Copy .bin and .idx to the store again."
                )
            self.traffic.fetched_bytes += len(data)
            if self._disk:
                self._disk.write(key, data)
        self.traffic.fetched_blocks += len(keys)
        return dict(zip(keys, fetched, strict=True))

    def _report(self) -> None:
        """Log bandwidth and waiting time of this process once a minute of fetching."""
        (since, before), now = self._reported, self.traffic
        elapsed_s = time.monotonic() - since
        if elapsed_s < _REPORT_EVERY_S or now.fetched_blocks == before.fetched_blocks:
            return
        fetched_mb = (now.fetched_bytes - before.fetched_bytes) / 1e6
        waited_s = now.waited_s - before.waited_s
        used = sum((now.memory_blocks, now.disk_blocks, now.fetched_blocks))
        used -= sum((before.memory_blocks, before.disk_blocks, before.fetched_blocks))
        log.info(
            "object store, process %d: %.0f MB in %.1f s of waiting (%.0f MB/s), %.0f %% of "
            "the time; %.0f %% of %d blocks were cached in memory or on disk",
            *(os.getpid(), fetched_mb, waited_s, fetched_mb / max(waited_s, 1e-9)),
            *(100 * waited_s / elapsed_s,),
            *(100 * (1 - (now.fetched_blocks - before.fetched_blocks) / used), used),
        )
        copy = Traffic(**{name: getattr(now, name) for name in Traffic.__slots__})
        self._reported = (time.monotonic(), copy)


class _BlockCache:
    """Blocks on a local disk, one file with a checksum for each, shared by all processes.

    Args:
        root: folder of the blocks of all datasets.
        name: name of this dataset's folder; it changes with the files' versions.
        limit_bytes: largest number of bytes below ``root``.
    """

    def __init__(self, root: Path, name: str, limit_bytes: int) -> None:
        self._root = root
        self._folder = root / name
        self._limit_bytes = limit_bytes
        self._unchecked = limit_bytes  # a cache of an earlier run may be full

    def read(self, key: tuple[int, int]) -> bytes | None:
        """Return a block; None if it is missing or damaged."""
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        is_whole = len(data) > 4 and zlib.crc32(data[:-4]) == int.from_bytes(
            data[-4:], "little"
        )
        return data[:-4] if is_whole else None

    def write(self, key: tuple[int, int], data: bytes) -> None:
        """Add a block; errors of the disk are ignored."""
        path = self._path(key)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(data + zlib.crc32(data).to_bytes(4, "little"))
            partial.replace(path)
        self._unchecked += len(data)
        if self._unchecked > self._limit_bytes // _CHECKED_SHARE:
            self._unchecked = 0
            self._make_room()

    def _path(self, key: tuple[int, int]) -> Path:
        number, block = key
        return self._folder / f"{number}-{block // _PER_FOLDER}" / f"{block % _PER_FOLDER}"

    def _make_room(self) -> None:
        """Remove the oldest blocks until a tenth of the limit is free."""
        blocks = []
        for folder, _, names in os.walk(self._root):
            for name in names:
                with contextlib.suppress(OSError):  # another process removed it
                    info = os.stat(os.path.join(folder, name))
                    blocks.append((info.st_mtime, info.st_size, os.path.join(folder, name)))
        total = sum(size for _, size, _ in blocks)
        if total <= self._limit_bytes:
            return
        for _, size, path in sorted(blocks):
            if total <= self._limit_bytes * 9 // 10:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size


def _find(address: str) -> tuple[Any, str, dict[str, Any]]:
    """Return a file's store, its name in the store, and the store's metadata of the file."""
    system, path = open_store(address)
    try:
        return system, path, system.info(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{address} does not exist. Give a prefix for which both .bin and .idx exist."
        ) from None
