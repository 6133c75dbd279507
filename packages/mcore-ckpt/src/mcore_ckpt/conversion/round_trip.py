"""Verifies a conversion: reads the output, maps it back and compares it bit by bit."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.open_checkpoint import PREFIX, OpenCheckpoint
from mcore_ckpt.formats.sources import opened
from mcore_ckpt.mapping.optimizer_state import StateKind, native_name
from mcore_ckpt.mapping.row_streams import (
    Progress,
    Rows,
    Source,
    named_with_progress,
    same_bits,
    slabs,
)
from mcore_ckpt.mapping.views import ResizedTensors, their_slabs
from mcore_ckpt.storage.files import Checksums, Reader, memory
from mcore_ckpt.storage.index import Index

Judge = Callable[[Rows, Path], None]
"""Checks an output that was read back; if it raises, the output is removed."""


def fingerprint(
    tensors: Rows, on_progress: Progress | None = None, *, trusts_checksums: bool = True
) -> str:
    """Return a hash of tensors' names, dtypes, shapes and values, in the order of names.

    Values enter the hash as the CRC32 of each block.

    Args:
        tensors: by logical name.
        on_progress: called for each tensor.
        trusts_checksums: use checksums listed in mcore files instead of reading the values.
    """
    total = hashlib.sha256()
    sizes = {name: tensors.entries[name].num_bytes for name in sorted(tensors.entries)}
    for name in named_with_progress(sizes, on_progress, "summing"):
        entry = tensors.entries[name]
        sums: tuple[int, ...] = ()
        if trusts_checksums and len(entry.chunks) == 1:
            sums = entry.chunks[0].checksums
        if not sums:
            checksums = Checksums()
            for slab in slabs(tensors, name):
                checksums.update(memory(slab))
            sums = checksums.finish()
        shape = list(entry.shape)
        total.update(f"{name} {entry.dtype} {shape} {list(sums)}\n".encode())
    return total.hexdigest()[:32]


def verify_tensors(
    source: OpenCheckpoint | StateKind, read_back: Rows, on_progress: Progress | None = None
) -> None:
    """Map the output's tensors back to the source's format and compare them bit by bit.

    Raises:
        CheckpointError: with the first tensor that differs.
    """
    if read_back.entries.keys() != source.ours.entries.keys():
        differing = sorted(read_back.entries.keys() ^ source.ours.entries.keys())
        raise CheckpointError(
            f"proof failed: {differing[0]} is on one side only. The output was removed."
        )
    source_rows: dict[str, int] = {}
    for link in source.links:
        shape = source.theirs.entries[link.theirs].shape
        source_rows |= dict(zip(link.ours, link.shares(shape), strict=True)) if shape else {}
    resized = ResizedTensors(read_back, source_rows)
    links = {link.theirs: link for link in source.links}
    sizes = {name: source.theirs.entries[name].num_bytes for name in links}
    for name in named_with_progress(sizes, on_progress, "reading back"):
        link = links[name]
        shape = source.theirs.entries[link.theirs].shape
        rows = shape[0] if shape else 1
        if not link.transposed and shape:
            # Padding rows have no meaning; removed rows cannot be restored.
            common_rows = [
                min(read_back.entries[name].shape[0], source_rows[name]) for name in link.ours
            ]
            rows = sum(common_rows)
        _compare(link.theirs, their_slabs(link, resized), source.theirs, rows)


def verify_written(
    source: OpenCheckpoint,
    form: str,
    folder: Path,
    judge: Judge,
    on_progress: Progress | None = None,
) -> str:
    """Open an output like an input, compare it with the source, return its fingerprint.

    Raises:
        CheckpointError: naming the first tensor that differs.
    """
    has_state = source.state is not None
    size = source.description["vocab_size"] if form == "megatron" else 0
    # Unknown fields that were carried along are in the output too.
    options = ConvertOptions(
        vocab_size=size, optimizer=has_state, keep_unknown_config_fields=form == "hf"
    )
    with opened(form, folder, options) as read_back:
        verify_tensors(source, read_back.ours, on_progress)
        if source.state is not None and read_back.state is not None:
            for kind, part in source.state.parts.items():
                verify_tensors(part, read_back.state.parts[kind].ours, on_progress)
        judge(read_back.ours, folder)
        return fingerprint(read_back.ours, on_progress)


def verify_native(
    source: OpenCheckpoint,
    folder: Path,
    index: Index,
    *,
    judge: Judge,
    on_progress: Progress | None = None,
) -> str:
    """Compare a step before its index is written; return its fingerprint.

    Raises:
        CheckpointError: naming the first tensor that differs.
    """
    with Reader(folder) as reader:

        def written(prefix: str) -> Source:
            entries = {
                name.removeprefix(prefix): entry
                for name, entry in index.tensors.items()
                if name.startswith(prefix)
            }
            return Source(reader, entries)

        weights = written(PREFIX)
        verify_tensors(source, weights, on_progress)
        for kind, part in source.state.parts.items() if source.state else ():
            verify_tensors(part, written(native_name(kind, "")), on_progress)
        judge(weights, folder)
        return fingerprint(weights)


def _compare(name: str, written: Iterator[Tensor], source: Rows, rows: int) -> None:
    done = 0
    for slab in written:
        count = min(slab.shape[0] if slab.dim() else 1, rows - done)
        if count <= 0:
            return
        expected = source.rows(name, done, done + count)
        if not same_bits(slab[:count] if slab.dim() else slab, expected):
            raise CheckpointError(
                f"proof failed: {name} differs when the output is converted back. The output "
                "was removed."
            )
        done += count
    if done != rows:
        raise CheckpointError(f"proof failed: the output gives {done} of {rows} rows of {name}")
