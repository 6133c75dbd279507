"""Reads files of ``torch.save`` in place: tensors stay in the file.

Both forms are read: the zip archive since torch 1.6, whose members are uncompressed, and the
older stream. A tensor becomes a ``FileTensor`` with its offset; everything else becomes plain
data or a ``Record``. Nothing is executed.
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
    """Its size."""
    offset: int
    """First byte in the file."""


@dataclass(slots=True)
class _Storage:
    dtype: str
    key: str
    offset: int = -1


@dataclass(frozen=True, slots=True)
class _UnplacedTensor:
    """A tensor whose storage offset is known only after the pickle was read."""

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
        got = os.preadv(self._descriptor, [view[:count]], self._offset + self._at)
        self._at += got
        return got


def read_torch_file(path: Path, offset: int = 0, length: int = -1) -> Any:
    """Read an object of ``torch.save`` from a file, or from a range of one.

    Returns:
        The object, with tensors as ``FileTensor``s and foreign classes as ``Record``s.

    Raises:
        CheckpointError: if it is no such file, names a class that is not allowed, or a tensor
            is not contiguous or reaches beyond the file.
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
                raise CheckpointError(f"{path} has {name} compressed, as torch never writes.")
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise CheckpointError(f"{path} was written on a big-endian machine.")
        content = archive.read(members["data.pkl"])
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{path} is no sound file of torch.save: {error!r}") from None

    found = load_inert(content, str(path), _storage, _SPECIAL)
    place = partial(_place_in_zip, members, descriptor, path, offset)
    return _placed(found, {}, place, path)


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
        raise CheckpointError(f"{path} lacks storage {storage.key}, or has it compressed.")
    header = os.pread(descriptor, _LOCAL_HEADER_BYTES, offset + info.header_offset)
    # The local header ends with the member's name and extra field, of variable length.
    between = sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    start = offset + info.header_offset + _LOCAL_HEADER_BYTES + between
    return start, start + info.file_size


def _read_stream(file: io.BufferedReader, path: Path, offset: int, length: int) -> Any:
    """Read torch's form before 1.6: five pickles, then the storages with their sizes."""
    where = str(path)
    if load_inert(file, where) != _LEGACY_MAGIC or load_inert(file, where) != 1001:
        raise CheckpointError(f"{path} is not a file of torch.save.")
    system = load_inert(file, where)
    if not isinstance(system, dict) or not system.get("little_endian", True):
        raise CheckpointError(f"{path} was written on a big-endian machine.")
    found = load_inert(file, where, _storage, _SPECIAL)
    keys = load_inert(file, where)
    dtypes: dict[str, str] = {}
    _collect(found, dtypes, set())
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        count = int.from_bytes(file.read(8), "little", signed=True)
        start = file.tell()
        end = start + count * DTYPE_BYTES[dtypes.get(str(key), "U8")]
        if count < 0 or end > length:
            raise CheckpointError(f"{path} ends within its storages: the file was cut short.")
        places[str(key)] = (offset + start, offset + end)
        file.seek(end)

    def place(storage: _Storage) -> tuple[int, int]:
        return places[storage.key]

    return _placed(found, {}, place, path)


def _storage(pid: Any) -> _Storage:
    kind, dtype, key, *_ = pid
    if kind != "storage":
        raise CheckpointError(f"a reference to {kind!r} is not known")
    name = dtype if isinstance(dtype, str) else STORAGE_DTYPES.get(dtype.name, "")
    return _Storage(name, str(key))


def _tensor(storage: Any, first: int, shape: Any, steps: Any, *_: Any) -> _UnplacedTensor:
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor lies in something that is no storage")
    return _UnplacedTensor(storage, first, tuple(shape), tuple(steps))


_SPECIAL: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
}


def _collect(value: Any, dtypes: dict[str, str], seen: set[int]) -> None:
    """Record the dtype of every tensor's storage; visits shared containers once."""
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
    """Set the offsets of tensors, recursively; shared objects stay shared.

    The caller keeps all containers alive, so that ``id`` is unique.
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
    real = [(n, s) for n, s in zip(tensor.shape, tensor.steps, strict=True) if n != 1]
    plain = strides([n for n, _ in real])
    if prod(tensor.shape) and tuple(s for _, s in real) != plain:
        raise CheckpointError(
            f"{path} holds a tensor of shape {list(tensor.shape)} that does not lie in order "
            f"(strides {list(tensor.steps)}): save it contiguous."
        )
    offset = start + tensor.first * DTYPE_BYTES[dtype]
    if tensor.first < 0 or offset + prod(tensor.shape) * DTYPE_BYTES[dtype] > end:
        raise CheckpointError(f"{path} holds a tensor that reaches beyond its storage.")
    return FileTensor(dtype, tensor.shape, offset)
