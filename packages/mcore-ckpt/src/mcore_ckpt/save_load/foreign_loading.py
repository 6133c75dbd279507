"""Opens folders of other formats as checkpoints, without a conversion.

If a foreign tensor holds logical tensors as ranges of its rows, the index points directly into
its file, and ranks read the rows they need as from a step of mcore. Tensors that are
transposed, interleaved or quantized are read by rows through the views that a conversion uses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

from torch import Tensor

from mcore_ckpt.formats.open_checkpoint import PREFIX, OpenCheckpoint
from mcore_ckpt.formats.recognition import folder_format
from mcore_ckpt.formats.sources import opened
from mcore_ckpt.mapping.row_streams import HeldRows, Rows
from mcore_ckpt.storage.boxes import Box
from mcore_ckpt.storage.files import Reader, narrow_to_box
from mcore_ckpt.storage.index import ADAPTER, DTYPE_BYTES, Index, StoredBox, TensorEntry
from mcore_ckpt.storage.paths import is_peft_folder

_VIEW = ""
"""File name of chunks whose bytes are in no file in row-major order: they are read by a
view."""


@contextmanager
def opened_foreign(
    folder: Path, adapter_base: Path | None = None
) -> Iterator[tuple[Index, Reader]]:
    """Open a folder of another format; yield an index of logical tensors and a reader.

    Args:
        folder: folder of a model, or of PEFT adapters.
        adapter_base: folder of the adapters' base model; None: the folder named in the
            adapters' config.

    Raises:
        ValueError: if no family here can express the folder's model.
        CheckpointError: if files are damaged or contradict each other.
    """
    if is_peft_folder(folder):
        with _opened_adapters(folder, adapter_base) as source:
            yield source
        return
    with (
        opened(folder_format(folder), folder) as source,
        ViewReader(folder, source.ours) as reader,
    ):
        tensors = {PREFIX + name: entry for name, entry in pointers(source).items()}
        yield Index(tensors, {"model": source.description, "hf": source.hf}), reader


@contextmanager
def _opened_adapters(folder: Path, base: Path | None) -> Iterator[tuple[Index, Reader]]:
    """Open a PEFT folder; without ``base``, the base model is the one named in its config."""
    from mcore_ckpt.formats.peft_folder import base_folder, read_adapters

    base = base or base_folder(folder)
    with opened("hf", base) as source:
        adapters = read_adapters(folder, source.links)
        adapters.check_tables(source.ours)
        extra = {"model": source.description, "hf": source.hf}
    extra[ADAPTER] = {**adapters.config, "base": str(base.resolve())}
    tensors = {}
    rows = HeldRows({**adapters.rows.tensors, **adapters.replaced.tensors})
    for name, entry in rows.entries.items():
        chunk = StoredBox(_VIEW, 0, (0,) * len(entry.shape), entry.shape)
        tensors[PREFIX + name] = replace(entry, chunks=(chunk,))
    with ViewReader(folder, rows) as reader:
        yield Index(tensors, extra), reader


def pointers(source: OpenCheckpoint) -> dict[str, TensorEntry]:
    """Return the logical tensors, each as one chunk of the foreign file that holds it.

    Returns:
        Entries by logical name. The file of a chunk is ``_VIEW`` if no file holds the tensor's
        bytes in row-major order.
    """
    entries = {}
    for link in source.links:
        foreign = source.theirs.entries[link.theirs]
        is_direct = link.is_plain and len(foreign.chunks) == 1
        for name, (first, _) in zip(link.ours, link.rows(foreign.shape), strict=True):
            entry = source.ours.entries[name]
            zeros = (0,) * len(entry.shape)
            chunk = StoredBox(_VIEW, 0, zeros, entry.shape)
            if is_direct:
                # Rows from `first` on of the foreign tensor are the logical tensor.
                row_bytes = prod(foreign.shape[1:]) * DTYPE_BYTES[foreign.dtype]
                stored = foreign.chunks[0]
                chunk = replace(
                    chunk, file=stored.file, offset=stored.offset + first * row_bytes
                )
            entries[name] = replace(entry, chunks=(chunk,) if prod(entry.shape) else ())
    return entries


class ViewReader(Reader):
    """Reads boxes directly from their files, or through a view of rows if a file cannot."""

    def __init__(self, folder: Path, view: Rows) -> None:
        super().__init__(folder)
        self._view = view

    def read(
        self, name: str, entry: TensorEntry, chunk: StoredBox, box: Box, target: Tensor
    ) -> None:
        """Read a region of a tensor; see ``Reader.read``."""
        if chunk.file != _VIEW:
            super().read(name, entry, chunk, box, target)
            return
        (begin, *_), (count, *_) = (box[0] or (0,)), (box[1] or (1,))
        with self._opening:  # views cache a transposed matrix and are not thread-safe
            rows = self._view.rows(name.removeprefix(PREFIX), begin, begin + count)
        whole_rows = ((0, *box[0][1:]), box[1]) if box[0] else ((), ())
        target.copy_(narrow_to_box(rows, whole_rows))
