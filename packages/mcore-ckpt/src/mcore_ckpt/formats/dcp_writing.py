"""Writes directories of torch.distributed.checkpoint in slabs.

Torch's classes describe the contents, so that torch's reader loads the result under any layout.
Importing these classes takes as long as importing torch: import this module only on use.
"""

import io
import os
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
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

from mcore_base.atomic_files import sync_folder, write_durably
from mcore_ckpt.errors import write_error
from mcore_ckpt.formats.recognition import DCP_METADATA
from mcore_ckpt.mapping.rules import split_index
from mcore_ckpt.storage.files import DTYPES, Item


def write_dcp_folder(
    path: Path,
    items: Sequence[Item],
    objects: Mapping[str, Any] | None = None,
    *,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write tensors and objects to a directory, ``.metadata`` last.

    Each slab becomes a box, so that memory stays bounded. An item named ``X[3,7]`` becomes part
    of a tensor ``X``, whose leading sizes follow from the largest indices.

    Args:
        path: an empty folder.
        items: all tensors; their slabs are complete rows.
        objects: other values, saved by ``torch.save``.
        max_file_bytes: size at which another file begins.

    Raises:
        CheckpointError: if the disk fails.
    """
    try:
        _write(path, items, objects or {}, _Writer(path, max_file_bytes))
    except OSError as error:
        raise write_error(path, error) from error


def _write(
    path: Path, items: Sequence[Item], objects: Mapping[str, Any], writer: "_Writer"
) -> None:
    boxes: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    with writer:
        for name, value in objects.items():
            buffer = io.BytesIO()
            torch.save(value, buffer)
            writer.add(MetadataIndex(name), buffer.getvalue())
        for item in items:
            name, index = split_index(item.name)
            known_sizes, _ = shapes.get(name, ((0,) * len(index), ""))
            leading = tuple(max(n, i + 1) for n, i in zip(known_sizes, index, strict=False))
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
    listed |= {name: BytesStorageMetadata() for name in objects}
    metadata = Metadata(listed, {name: (name,) for name in listed}, writer.places)
    metadata.storage_meta = StorageMeta()
    write_durably(path / DCP_METADATA, pickle.dumps(metadata))


class _Writer:
    """Writes boxes one after another into files of bounded size."""

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
            # torch.save writes the whole storage of a tensor, even for a view of a part.
            if value.untyped_storage().nbytes() != value.numel() * value.element_size():
                value = value.clone()
            # Into a buffer first: torch would report a full disk as an internal error.
            buffer = io.BytesIO()
            torch.save(value, buffer)
            file.write(buffer.getbuffer())
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
