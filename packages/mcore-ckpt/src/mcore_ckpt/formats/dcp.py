"""Directories of torch.distributed.checkpoint, read in place; ``dcp_writing`` writes them.

Such a directory has a ``.metadata`` pickle, written last, with the file, offset and box of
every part of every tensor; each part is what ``torch.save`` writes. Both pickles are read as
data, so a foreign directory cannot run code; tensors are then read like ours, rows at a time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.recognition import DCP_METADATA
from mcore_ckpt.formats.safe_pickle import Record, load_inert
from mcore_ckpt.formats.torch_files import FileTensor, read_torch_file
from mcore_ckpt.storage.boxes import cover_problems
from mcore_ckpt.storage.index import StoredBox, TensorEntry
from mcore_ckpt.storage.paths import path_within


@dataclass(frozen=True, slots=True)
class Place:
    """Where one box of a tensor, or one object, is stored."""

    file: str
    """Name within the folder."""
    offset: int
    """First byte."""
    length: int
    """Bytes that ``torch.save`` wrote."""


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor as the directory lists it; its bytes have not been read."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """Safetensors' name."""
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], Place], ...]
    """Offsets, lengths and place of each box."""


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """Tensors and objects that a directory lists."""

    path: Path
    """The folder."""
    tensors: Mapping[str, DcpTensor]
    """By name."""
    objects: Mapping[str, Place]
    """Everything that is no tensor, by name."""

    def locate(self, names: Iterable[str]) -> dict[str, TensorEntry]:
        """Return index entries of tensors; every box must be stored row-major.

        Raises:
            CheckpointError: if files are damaged, or boxes do not cover a tensor.
        """
        return {name: self._entry(name, self.tensors[name]) for name in names}

    def read_object(self, name: str) -> Any:
        """Read an object that is no tensor, as data; foreign classes become records."""
        place = self.objects[name]
        return read_torch_file(self.path / place.file, place.offset, place.length)

    def _entry(self, name: str, listed: DcpTensor) -> TensorEntry:
        problems = cover_problems(listed.shape, [(o, n) for o, n, _ in listed.boxes])
        if problems and all(listed.shape):
            raise CheckpointError(f"{self.path / DCP_METADATA}: {name}: {problems[0]}")
        chunks = []
        for offsets, lengths, place in listed.boxes:
            if not all(lengths):
                continue
            found = read_torch_file(self.path / place.file, place.offset, place.length)
            if not isinstance(found, FileTensor) or found.shape != lengths:
                raise CheckpointError(
                    f"{self.path / place.file} lacks the box of {name} that its metadata lists."
                )
            if found.dtype != listed.dtype:
                raise CheckpointError(
                    f"{self.path / place.file}: {name} is not {listed.dtype}."
                )
            chunks.append(StoredBox(place.file, found.offset, offsets, lengths))
        return TensorEntry(listed.shape, listed.dtype, tuple(chunks))


def read_dcp_folder(path: str | Path) -> DcpFolder:
    """Read the metadata of a directory, executing nothing."""
    path = Path(path)
    try:
        content = (path / DCP_METADATA).read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"{path} holds no {DCP_METADATA}: it is no complete torch.distributed.checkpoint "
            "directory."
        ) from None
    where = path / DCP_METADATA
    found = load_inert(content, str(where))
    try:
        return _folder(path, found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is not what torch writes: {error!r}") from None


def _folder(path: Path, found: Record) -> DcpFolder:
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for key, info in found.get("storage_data").items():
        offset = key.get("offset")
        if info.get("transform_descriptors"):
            raise CheckpointError(f"{path} is compressed or transformed: write it plain first.")
        name = str(info.get("relative_path"))
        path_within(path, name)
        place = Place(name, info.get("offset"), info.get("length"))
        places[(key.get("fqn"), None if offset is None else tuple(offset))] = place
    tensors: dict[str, DcpTensor] = {}
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
        tensors[name] = DcpTensor(tuple(record.get("size")), dtype, tuple(boxes))
    return DcpFolder(path, tensors, objects)
