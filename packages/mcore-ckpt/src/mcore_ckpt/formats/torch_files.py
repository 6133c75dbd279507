"""Locates the tensors in files of ``torch.save``, without executing or copying anything.

Both formats are supported: the zip archive since torch 1.6, whose members are uncompressed, and
the older stream. A tensor becomes a ``FileTensor`` with its offset; other objects become plain
data or a ``Record``.
"""

import io
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.safe_pickle import STORAGE_DTYPES, Record, load_inert
from mcore_ckpt.storage.boxes import strides
from mcore_ckpt.storage.index import DTYPE_BYTES

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LOCAL_HEADER_BYTES = 30


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor stored row-major in a file."""

    dtype: str
    """Safetensors' name."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    offset: int
    """First byte in the file."""


@dataclass(slots=True)
class _Storage:
    dtype: str
    key: str
    offset: int = -1


@dataclass(frozen=True, slots=True)
class _UnplacedTensor:
    """A tensor whose storage offset is not known until the pickle has been read."""

    storage: _Storage
    first: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]


class Window(io.RawIOBase):
    """A range of a file presented as a file, by positioned reads."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move within the range."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("position before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        num_read = os.preadv(self._descriptor, [view[:count]], self._offset + self._at)
        self._at += num_read
        return num_read


def read_torch_file(path: Path, offset: int = 0, length: int = -1) -> Any:
    """Return the object that ``torch.save`` wrote to a file, or to a range of a file.

    Returns:
        The object, with tensors as ``FileTensor``s and foreign classes as ``Record``s.

    Raises:
        CheckpointError: if ``torch.save`` did not write the file, its pickle has a name that is
            not allowed, or a tensor is not contiguous or reaches beyond the file.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        length = size - offset if length < 0 else length
        if offset < 0 or offset + length > size:
            raise CheckpointError(
                f"{path} ends before byte {offset + length}: it was cut short."
            )
        window = Window(descriptor, offset, length)
        if os.pread(descriptor, 2, offset) == b"PK":
            return _read_zip(window, descriptor, path, offset)
        return _read_stream(io.BufferedReader(window), path, offset, length)
    finally:
        os.close(descriptor)


def _read_zip(window: Window, descriptor: int, path: Path, offset: int) -> Any:
    try:
        archive = zipfile.ZipFile(window)
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for name in ("byteorder", "data.pkl"):
            # torch.save compresses nothing: a small file cannot expand.
            if name in members and members[name].compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(
                    f"{path} has {name} compressed, which torch.save never does."
                )
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise CheckpointError(f"{path} was written on a big-endian machine.")
        content = archive.read(members["data.pkl"])
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"{path} is damaged, or not a file of torch.save: {error!r}"
        ) from None

    content_tree = load_inert(content, str(path), _storage, _SPECIAL)
    locate = partial(_place_in_zip, members, descriptor, path, offset)
    return _placed(content_tree, {}, locate, path)


def _place_in_zip(
    members: Mapping[str, zipfile.ZipInfo],
    descriptor: int,
    path: Path,
    offset: int,
    storage: _Storage,
) -> tuple[int, int]:
    """Return the range of a storage's bytes in a file that contains an archive."""
    info = members.get(f"data/{storage.key}")
    if info is None or info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(
            f"{path} is damaged: storage {storage.key} is missing or compressed."
        )
    header = os.pread(descriptor, _LOCAL_HEADER_BYTES, offset + info.header_offset)
    # The local header ends with the member's name and extra field, of variable length.
    between = sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    start = offset + info.header_offset + _LOCAL_HEADER_BYTES + between
    return start, start + info.file_size


def _read_stream(file: io.BufferedReader, path: Path, offset: int, length: int) -> Any:
    """Read torch's format before 1.6: five pickles, then each storage after its size."""
    where = str(path)
    if load_inert(file, where) != _LEGACY_MAGIC or load_inert(file, where) != 1001:
        raise CheckpointError(f"{path} is not a file of torch.save.")
    system = load_inert(file, where)
    if not isinstance(system, dict) or not system.get("little_endian", True):
        raise CheckpointError(f"{path} was written on a big-endian machine.")
    content_tree = load_inert(file, where, _storage, _SPECIAL)
    keys = load_inert(file, where)
    dtypes: dict[str, str] = {}
    _collect(content_tree, dtypes, set())
    ranges: dict[str, tuple[int, int]] = {}
    for key in keys:
        count = int.from_bytes(file.read(8), "little", signed=True)
        start = file.tell()
        end = start + count * DTYPE_BYTES[dtypes.get(str(key), "U8")]
        if count < 0 or end > length:
            raise CheckpointError(f"{path} ends within its storages: the file was cut short.")
        ranges[str(key)] = (offset + start, offset + end)
        file.seek(end)

    def place(storage: _Storage) -> tuple[int, int]:
        return ranges[storage.key]

    return _placed(content_tree, {}, place, path)


def _storage(pid: Any) -> _Storage:
    kind, dtype, key, *_ = pid
    if kind != "storage":
        raise CheckpointError(f"a pickle refers to {kind!r}, not to a storage")
    name = dtype if isinstance(dtype, str) else STORAGE_DTYPES.get(dtype.name, "")
    return _Storage(name, str(key))


def _tensor(storage: Any, first: int, shape: Any, steps: Any, *_: Any) -> _UnplacedTensor:
    if not isinstance(storage, _Storage):
        raise ValueError("the pickle has a tensor without a storage")
    return _UnplacedTensor(storage, first, tuple(shape), tuple(steps))


_SPECIAL: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
}


def _collect(value: Any, dtypes: dict[str, str], seen: set[int]) -> None:
    """Add the dtype of each storage to ``dtypes``; visits shared containers once."""
    if isinstance(value, _UnplacedTensor):
        dtypes[value.storage.key] = value.storage.dtype
    if id(value) in seen or not isinstance(value, (Mapping, list, tuple, Record)):
        return
    seen.add(id(value))
    if isinstance(value, Record):
        _collect(value.state, dtypes, seen)
        return
    for one in value.values() if isinstance(value, Mapping) else value:
        _collect(one, dtypes, seen)


def _placed(value: Any, seen: dict[int, Any], place: Any, path: Path) -> Any:
    """Return a value with ``FileTensor``s in place of unplaced tensors, recursively.

    Shared objects stay shared. The caller keeps all containers alive, so that ``id`` is unique.
    """
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, _UnplacedTensor):
        return _located(value, place, path)
    if isinstance(value, Mapping):
        new: Any = {}
        seen[id(value)] = new
        new |= {key: _placed(one, seen, place, path) for key, one in value.items()}
        return new
    if isinstance(value, (list, tuple)):
        placed = type(value)([_placed(one, seen, place, path) for one in value])
        seen[id(value)] = placed
        return placed
    if isinstance(value, Record):
        seen[id(value)] = value
        value.state = _placed(value.state, seen, place, path)
    return value


def _located(tensor: _UnplacedTensor, place: Any, path: Path) -> FileTensor:
    start, end = place(tensor.storage)
    dtype = tensor.storage.dtype
    # Strides of dimensions of size 1 have no meaning.
    sized = [(n, s) for n, s in zip(tensor.shape, tensor.steps, strict=True) if n != 1]
    contiguous = strides([n for n, _ in sized])
    if prod(tensor.shape) and tuple(s for _, s in sized) != contiguous:
        raise CheckpointError(
            f"{path} holds a tensor of shape {list(tensor.shape)} that is not contiguous "
            f"(strides {list(tensor.steps)}): call contiguous() before saving."
        )
    offset = start + tensor.first * DTYPE_BYTES[dtype]
    if tensor.first < 0 or offset + prod(tensor.shape) * DTYPE_BYTES[dtype] > end:
        raise CheckpointError(f"{path} holds a tensor that reaches beyond its storage.")
    return FileTensor(dtype, tensor.shape, offset)
