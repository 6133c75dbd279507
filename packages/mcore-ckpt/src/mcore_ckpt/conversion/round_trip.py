"""The proof that ends a conversion: the output is read, mapped back and compared bit by bit."""

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
"""Inspects an output that was read back, before it is kept; raises to have it removed."""


def fingerprint(
    tensors: Rows, on_progress: Progress | None = None, *, trusts_checksums: bool = True
) -> str:
    """Hash tensors: names, dtypes, shapes and content, in the order of names.

    Values enter as the CRC32 of each block.

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


def prove(
    source: OpenCheckpoint | StateKind, again: Rows, on_progress: Progress | None = None
) -> None:
    """Map tensors that were read back from the output to the source's, and compare them."""
    if again.entries.keys() != source.ours.entries.keys():
        odd = sorted(again.entries.keys() ^ source.ours.entries.keys())
        raise CheckpointError(f"proof failed: {odd[0]} is on one side only. It was not kept.")
    before: dict[str, int] = {}
    for link in source.links:
        shape = source.theirs.entries[link.theirs].shape
        before |= dict(zip(link.ours, link.shares(shape), strict=True)) if shape else {}
    back = ResizedTensors(again, before)
    links = {link.theirs: link for link in source.links}
    sizes = {name: source.theirs.entries[name].num_bytes for name in links}
    for name in named_with_progress(sizes, on_progress, "reading back"):
        link = links[name]
        shape = source.theirs.entries[link.theirs].shape
        rows = shape[0] if shape else 1
        if not link.transposed and shape:
            # Padding rows have no meaning; removed rows cannot be restored.
            kept = [min(again.entries[name].shape[0], before[name]) for name in link.ours]
            rows = sum(kept)
        _compare(link.theirs, their_slabs(link, back), source.theirs, rows)


def proven(
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
    with opened(form, folder, options) as again:
        prove(source, again.ours, on_progress)
        if source.state is not None and again.state is not None:
            for kind, part in source.state.parts.items():
                prove(part, again.state.parts[kind].ours, on_progress)
        judge(again.ours, folder)
        return fingerprint(again.ours, on_progress)


def proven_native(
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
        prove(source, weights, on_progress)
        for kind, part in source.state.parts.items() if source.state else ():
            prove(part, written(native_name(kind, "")), on_progress)
        judge(weights, folder)
        return fingerprint(weights)


def _compare(name: str, written: Iterator[Tensor], source: Rows, rows: int) -> None:
    done = 0
    for slab in written:
        count = min(slab.shape[0] if slab.dim() else 1, rows - done)
        if count <= 0:
            return
        there = source.rows(name, done, done + count)
        if not same_bits(slab[:count] if slab.dim() else slab, there):
            raise CheckpointError(
                f"proof failed: {name} is not what the output gives on the way back. It was "
                "not kept."
            )
        done += count
    if done != rows:
        raise CheckpointError(f"proof failed: {name} came back with {done} of {rows} rows")
