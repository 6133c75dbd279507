"""Loads folders of other formats in place, without a conversion, as if they were checkpoints.

Where a foreign tensor holds ours as ranges of its rows, an index points straight into its file,
and ranks read the rows they need as from a step of ours. Tensors that are transposed,
interleaved or quantized are read by rows through the views that a conversion uses.
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
from mcore_ckpt.storage.files import Reader, narrowed
from mcore_ckpt.storage.index import ADAPTER, DTYPE_BYTES, Index, StoredBox, TensorEntry
from mcore_ckpt.storage.paths import is_peft_folder

_VIEW = ""
"""File of tensors whose bytes no file holds in their order."""


@contextmanager
def opened_foreign(
    folder: Path, adapter_base: Path | None = None
) -> Iterator[tuple[Index, Reader]]:
    """Open a folder of another format as an index of our tensors and a reader of their boxes.

    Args:
        folder: of a model, or of PEFT's adapters.
        adapter_base: folder of the adapters' base; None: the one that they name.

    Raises:
        ValueError: if no family here can express its model.
        CheckpointError: if files are damaged or contradict each other.
    """
    if is_peft_folder(folder):
        with _opened_adapters(folder, adapter_base) as found:
            yield found
        return
    with (
        opened(folder_format(folder), folder) as found,
        ViewReader(folder, found.ours) as reader,
    ):
        tensors = {PREFIX + name: entry for name, entry in pointers(found).items()}
        yield Index(tensors, {"model": found.description, "hf": found.hf}), reader


@contextmanager
def _opened_adapters(folder: Path, base: Path | None) -> Iterator[tuple[Index, Reader]]:
    """Open a PEFT folder as adapters of ours; without a base, of the one that it names."""
    from mcore_ckpt.formats.peft_folder import base_folder, read_adapters

    base = base or base_folder(folder)
    with opened("hf", base) as found:
        adapters = read_adapters(folder, found.links)
        adapters.check_tables(found.ours)
        extra = {"model": found.description, "hf": found.hf}
    extra[ADAPTER] = {**adapters.config, "base": str(base.resolve())}
    tensors = {}
    rows = HeldRows({**adapters.rows.tensors, **adapters.replaced.tensors})
    for name, entry in rows.entries.items():
        chunk = StoredBox(_VIEW, 0, (0,) * len(entry.shape), entry.shape)
        tensors[PREFIX + name] = replace(entry, chunks=(chunk,))
    with ViewReader(folder, rows) as reader:
        yield Index(tensors, extra), reader


def pointers(found: OpenCheckpoint) -> dict[str, TensorEntry]:
    """List our tensors, each as one chunk of the foreign file that holds it.

    Returns:
        Entries by logical name. The file of a chunk is empty if no file holds the tensor's
        bytes in order.
    """
    entries = {}
    for link in found.links:
        theirs = found.theirs.entries[link.theirs]
        is_there = link.is_plain and len(theirs.chunks) == 1
        for name, (first, _) in zip(link.ours, link.rows(theirs.shape), strict=True):
            entry = found.ours.entries[name]
            zeros = (0,) * len(entry.shape)
            chunk = StoredBox(_VIEW, 0, zeros, entry.shape)
            if is_there:
                row_bytes = prod(theirs.shape[1:]) * DTYPE_BYTES[theirs.dtype]
                place = theirs.chunks[0]
                chunk = replace(chunk, file=place.file, offset=place.offset + first * row_bytes)
            entries[name] = replace(entry, chunks=(chunk,) if prod(entry.shape) else ())
    return entries


class ViewReader(Reader):
    """Reads boxes from files that hold them in order, otherwise through a view of rows."""

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
        target.copy_(narrowed(rows, whole_rows))
