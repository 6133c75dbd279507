"""Directories of torch.distributed.checkpoint: read in place, written in slabs.

Such a directory has a ``.metadata`` pickle, written last, that says in which file, from which
byte, each box of each tensor stands; each box is what ``torch.save`` writes. Both pickles are
read as data, so a foreign directory can run nothing; tensors are then read like ours, rows at
a time. What is written is what torch's own reader loads under any layout.
"""

import io
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_ckpt.boxes import cover_problems
from mcore_ckpt.files import DTYPES, Item
from mcore_ckpt.index import Chunk, TensorEntry
from mcore_ckpt.paths import sync_folder, write_durably
from mcore_ckpt.pickles import Record, load_inert
from mcore_ckpt.rules import split_index
from mcore_ckpt.torch_files import FileTensor, read_torch_file

METADATA = ".metadata"
"""Name of the file that makes a folder such a directory."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one box, or one object, stands."""

    file: str
    """Name within the folder."""
    offset: int
    """First byte."""
    length: int
    """Bytes that ``torch.save`` wrote."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A tensor as the directory lists it; its bytes were not looked at yet."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """Safetensors' name."""
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], Place], ...]
    """Offsets, lengths and place of each box."""


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """What a directory holds."""

    path: Path
    """The folder."""
    tensors: Mapping[str, Listed]
    """By name."""
    objects: Mapping[str, Place]
    """Everything else, by name."""

    def locate(self, names: Iterable[str]) -> dict[str, TensorEntry]:
        """Find the bytes of tensors; a box must lie in its file row-major.

        Raises:
            RuntimeError: if files are damaged, or boxes do not cover a tensor.
        """
        return {name: self._entry(name, self.tensors[name]) for name in names}

    def read_object(self, name: str) -> Any:
        """Read something that is no tensor, as data; foreign classes become records."""
        place = self.objects[name]
        return read_torch_file(self.path / place.file, place.offset, place.length)

    def read_bytes(self, name: str) -> bytes:
        """Read the raw bytes of an object."""
        place = self.objects[name]
        with (self.path / place.file).open("rb") as file:
            file.seek(place.offset)
            return file.read(place.length)

    def _entry(self, name: str, listed: Listed) -> TensorEntry:
        problems = cover_problems(listed.shape, [(o, n) for o, n, _ in listed.boxes])
        if problems and all(listed.shape):
            raise RuntimeError(f"{self.path / METADATA}: {name}: {problems[0]}")
        chunks = []
        for offsets, lengths, place in listed.boxes:
            if not all(lengths):
                continue
            found = read_torch_file(self.path / place.file, place.offset, place.length)
            if not isinstance(found, FileTensor) or found.shape != lengths:
                raise RuntimeError(
                    f"{self.path / place.file} has not the box of {name} that {METADATA} says."
                )
            if found.dtype != listed.dtype:
                raise RuntimeError(f"{self.path / place.file}: {name} is not {listed.dtype}.")
            chunks.append(Chunk(place.file, found.offset, offsets, lengths))
        return TensorEntry(listed.shape, listed.dtype, tuple(chunks))


def read_dcp_folder(path: str | Path) -> DcpFolder:
    """Read the list of a directory, executing nothing.

    Raises:
        ValueError: if it is no such directory.
        RuntimeError: if its ``.metadata`` is damaged or asks for unknown names.
    """
    path = Path(path)
    try:
        content = (path / METADATA).read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"{path} holds no {METADATA}: it is no complete torch.distributed.checkpoint "
            "directory."
        ) from None
    where = path / METADATA
    found = load_inert(content, str(where))
    try:
        return _folder(path, found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"{where} is not what torch writes: {error!r}") from None


def write_dcp_folder(
    path: Path,
    items: Sequence[Item],
    objects: Mapping[str, Any] | None = None,
    *,
    raw: Mapping[str, bytes] | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write a directory; ``.metadata`` comes last.

    Every slab becomes a box, so memory stays bounded. An item called ``X[3,7]`` becomes that
    part of a tensor ``X``, whose size follows from the largest numbers.

    Args:
        path: an empty folder.
        items: every tensor; slabs are whole rows.
        objects: what is no tensor, saved by ``torch.save``.
        raw: the same as bytes, saved as they are.
        max_file_bytes: when to begin another file.
    """
    writer = _Writer(path, max_file_bytes)
    boxes: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    with writer:
        for name, value in (objects or {}).items():
            buffer = io.BytesIO()
            torch.save(value, buffer)
            writer.add(MetadataIndex(name), buffer.getvalue())
        for name, content in (raw or {}).items():
            writer.add(MetadataIndex(name), content)
        for item in items:
            name, index = split_index(item.name)
            known, _ = shapes.get(name, ((0,) * len(index), ""))
            leading = tuple(max(n, i + 1) for n, i in zip(known, index, strict=False))
            shapes[name] = ((*leading, *item.shape), item.dtype)
            row = 0
            for slab in item.slabs():
                begin = (row, *(0,) * (len(item.shape) - 1)) if item.shape else ()
                offsets = torch.Size((*index, *begin))
                sizes = torch.Size((*(1,) * len(index), *slab.shape))
                boxes[name].append(ChunkStorageMetadata(offsets, sizes))
                number = len(boxes[name]) - 1
                writer.add(MetadataIndex(name, offsets, number), slab.reshape(sizes))
                row += slab.shape[0] if slab.dim() else 1
    listed: dict[str, Any] = {
        name: TensorStorageMetadata(
            TensorProperties(DTYPES[dtype]), torch.Size(shape), boxes[name]
        )
        for name, (shape, dtype) in shapes.items()
    }
    listed |= {name: BytesStorageMetadata() for name in (*(objects or {}), *(raw or {}))}
    metadata = Metadata(listed, {name: (name,) for name in listed}, writer.places)
    metadata.storage_meta = StorageMeta(str(path))
    write_durably(path / METADATA, pickle.dumps(metadata))


class _Writer:
    """Files of bounded size, one box after the other."""

    def __init__(self, path: Path, max_file_bytes: int) -> None:
        self._path, self._most = path, max_file_bytes
        self._file: IO[bytes] | None = None
        self._count = 0
        self.places: dict[MetadataIndex, _StorageInfo] = {}

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *problem: object) -> None:
        self._close()
        sync_folder(self._path)

    def add(self, index: MetadataIndex, value: bytes | Tensor) -> None:
        file = self._open()
        first = file.tell()
        if isinstance(value, bytes):
            file.write(value)
        else:
            # torch.save writes a tensor's whole storage, whatever part of it is seen.
            if value.untyped_storage().nbytes() != value.numel() * value.element_size():
                value = value.clone()
            torch.save(value, file)
        info = _StorageInfo(Path(file.name).name, first, file.tell() - first)
        self.places[index] = info

    def _open(self) -> IO[bytes]:
        if self._file is not None and self._file.tell() >= self._most:
            self._close()
        if self._file is None:
            self._file = (self._path / f"__0_{self._count}.distcp").open("xb")
            self._count += 1
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _folder(path: Path, found: Record) -> DcpFolder:
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for key, info in found.get("storage_data").items():
        offset = key.get("offset")
        if info.get("transform_descriptors"):
            raise RuntimeError(f"{path} is compressed or transformed: write it plain first.")
        name = str(info.get("relative_path"))
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RuntimeError(f"{path / METADATA} names {name}, outside its folder")
        place = Place(name, info.get("offset"), info.get("length"))
        places[(key.get("fqn"), None if offset is None else tuple(offset))] = place
    tensors: dict[str, Listed] = {}
    objects: dict[str, Place] = {}
    for name, record in found.get("state_dict_metadata").items():
        if record.name.endswith(".BytesStorageMetadata"):
            objects[name] = places[(name, None)]
            continue
        boxes = []
        for chunk in record.get("chunks"):
            offsets, lengths = tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))
            boxes.append((offsets, lengths, places[(name, offsets)]))
        dtype = record.get("properties").state[0]
        tensors[name] = Listed(tuple(record.get("size")), dtype, tuple(boxes))
    return DcpFolder(path, tensors, objects)
