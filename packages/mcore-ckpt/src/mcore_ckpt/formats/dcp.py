"""Reads directories of torch.distributed.checkpoint in place; ``dcp_writing`` writes them.

Such a directory has a ``.metadata`` pickle, written last, with the file, offset and box of each
part of each tensor; a part is the output of ``torch.save``. Both kinds of pickle are read as
data, so that a foreign directory cannot run code. Tensors are then read by rows.
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
    """File range that holds one box of a tensor, or one object."""

    file: str
    """Name within the folder."""
    offset: int
    """First byte of the range."""
    length: int
    """Bytes of the range, written by ``torch.save``."""


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor as listed in the directory's metadata."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """Safetensors' name."""
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], Place], ...]
    """Offsets, lengths and file range of each box."""


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """Tensors and objects of a directory, as listed in its metadata."""

    path: Path
    """The folder."""
    tensors: Mapping[str, DcpTensor]
    """Tensors by name."""
    objects: Mapping[str, Place]
    """Entries other than tensors, by name."""

    def locate(self, names: Iterable[str]) -> dict[str, TensorEntry]:
        """Return index entries of tensors by name; reads the headers of their parts.

        Raises:
            CheckpointError: if files are damaged, or boxes do not cover a tensor.
        """
        return {name: self._entry(name, self.tensors[name]) for name in names}

    def read_object(self, name: str) -> Any:
        """Return an object other than a tensor, as data; foreign classes become records."""
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
            file_tensor = read_torch_file(self.path / place.file, place.offset, place.length)
            if not isinstance(file_tensor, FileTensor) or file_tensor.shape != lengths:
                raise CheckpointError(
                    f"{self.path / place.file} is damaged: it lacks the listed box of {name}."
                )
            if file_tensor.dtype != listed.dtype:
                raise CheckpointError(
                    f"{self.path / place.file} is damaged: {name} is not {listed.dtype}."
                )
            chunks.append(StoredBox(place.file, file_tensor.offset, offsets, lengths))
        return TensorEntry(listed.shape, listed.dtype, tuple(chunks))


def read_dcp_folder(path: str | Path) -> DcpFolder:
    """Read the metadata of a directory as data, without executing the pickle.

    Raises:
        ValueError: if the directory has no metadata.
        CheckpointError: if the metadata is damaged or lists transformed or outside files.
    """
    path = Path(path)
    try:
        content = (path / DCP_METADATA).read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"{path} holds no {DCP_METADATA}: it is not a complete "
            "torch.distributed.checkpoint directory."
        ) from None
    where = path / DCP_METADATA
    metadata = load_inert(content, str(where))
    try:
        return _folder(path, metadata)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where} is damaged, or not written by torch: {error!r}"
        ) from None


def _folder(path: Path, metadata: Record) -> DcpFolder:
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for key, info in metadata.get("storage_data").items():
        offset = key.get("offset")
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{path} is compressed or transformed: save it without transforms."
            )
        name = str(info.get("relative_path"))
        path_within(path, name)
        place = Place(name, info.get("offset"), info.get("length"))
        places[(key.get("fqn"), None if offset is None else tuple(offset))] = place
    tensors: dict[str, DcpTensor] = {}
    objects: dict[str, Place] = {}
    for name, record in metadata.get("state_dict_metadata").items():
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
