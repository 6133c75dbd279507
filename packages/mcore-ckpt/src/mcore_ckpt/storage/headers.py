"""Headers of safetensors files: offset, dtype and shape of each tensor.

The safetensors library parses and validates the header, but does not expose offsets. They
follow from the order and sizes of the tensors, as data has no gaps.
"""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.storage.index import DTYPE_BYTES, StoredBox, TensorEntry
from mcore_ckpt.storage.paths import path_within

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


def read_header(folder: Path, file: str) -> dict[str, TensorEntry]:
    """Read the header of a safetensors file; each tensor is one chunk without checksums.

    Args:
        folder: folder of the checkpoint.
        file: path of the file within the folder; becomes the file of the chunks.

    Raises:
        CheckpointError: if the file lies outside of the folder, is cut short or damaged, or
            has a dtype that is not read here.
    """
    path = path_within(folder, file)
    try:
        with safe_open(path, framework="pt") as opened:
            tensors = [
                (name, tensor_slice.get_dtype(), tuple(tensor_slice.get_shape()))
                for name in opened.offset_keys()
                for tensor_slice in (opened.get_slice(name),)
            ]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a valid safetensors file of {path.stat().st_size} bytes: {error}. "
            "Copy or download it again."
        ) from None
    offset, size = len(read_header_bytes(path)), path.stat().st_size
    entries = {}
    for name, dtype, shape in tensors:
        if dtype not in DTYPE_BYTES:
            raise CheckpointError(
                f"{path}: {name} has the dtype {dtype}, which cannot be read: convert it to "
                f"one of {', '.join(DTYPE_BYTES)}."
            )
        if max(shape, default=0) > size:
            raise CheckpointError(f"{path}: {name} has the shape {list(shape)} without data.")
        chunk = StoredBox(file, offset, (0,) * len(shape), shape)
        entries[name] = TensorEntry(shape, dtype, (chunk,))
        offset += entries[name].num_bytes
    return entries


def read_header_bytes(path: Path) -> bytes:
    """Read the header of a safetensors file, including its 8 bytes of length."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(_LENGTH_BYTES)
        count = int.from_bytes(length, "little")
        if size < _LENGTH_BYTES or count > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is not a safetensors file: it has no header.")
        return length + file.read(count)
