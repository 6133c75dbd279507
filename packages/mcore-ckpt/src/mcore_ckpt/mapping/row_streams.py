"""Reads tensors as streams of rows, so that large tensors are never completely in memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mcore_ckpt.storage.boxes import Box, shift_box
from mcore_ckpt.storage.files import (
    DTYPE_NAMES,
    DTYPES,
    SLAB_BYTES,
    Item,
    Reader,
    narrow_to_box,
)
from mcore_ckpt.storage.index import TensorEntry
from mcore_ckpt.storage.shard_plans import plan_reads

Progress = Callable[[int, int, str], None]
"""Called with bytes done, total bytes, and the name of the current tensor."""


@runtime_checkable
class Rows(Protocol):
    """Tensors that are read by rows: stored in a folder, or computed while reading."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Shape and dtype of the rows; chunks are listed only for mcore files."""

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows ``begin`` to ``stop``; a tensor without dimensions is one row."""


class Source:
    """Tensors stored in a folder, read by rows."""

    def __init__(self, reader: Reader, entries: Mapping[str, TensorEntry]) -> None:
        self._reader = reader
        self.entries = entries

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows ``begin`` to ``stop``; a tensor without dimensions is one row."""
        entry = self.entries[name]
        box: Box = ((), ())
        if entry.shape:
            zeros = (0,) * (len(entry.shape) - 1)
            box = ((begin, *zeros), (stop - begin, *entry.shape[1:]))
        out = torch.empty(box[1], dtype=DTYPES[entry.dtype])
        for read in plan_reads(entry, box):
            view = narrow_to_box(out, shift_box(read.box, box[0]))
            self._reader.read(name, entry, entry.chunks[read.chunk], read.box, view)
        return out


class HeldRows:
    """Tensors in memory, by rows."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.entries = {
            name: TensorEntry(tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], ())
            for name, tensor in tensors.items()
        }

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Return rows on the host; a tensor without dimensions is one row."""
        tensor = self.tensors[name].detach()
        return (tensor[begin:stop] if tensor.dim() else tensor).cpu().contiguous()


def row_groups(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Split a tensor into groups of rows of bounded size."""
    total = shape[0] if shape else 1
    step = max(1, SLAB_BYTES // max(8, prod(shape[1:]) * 8))
    return [(row, min(row + step, total)) for row in range(0, total, step)]


def slabs(source: Rows, name: str) -> Iterator[Tensor]:
    """Yield a tensor by groups of rows."""
    for begin, stop in row_groups(source.entries[name].shape):
        yield source.rows(name, begin, stop)


def read_ahead(item: Item, reading: ThreadPoolExecutor) -> Item:
    """Return an item whose next slab is computed in a thread while the last one is used.

    Args:
        item: tensor to write.
        reading: pool of one thread, which must not end before the item is written.
    """
    is_long = item.num_bytes > SLAB_BYTES
    return replace(item, slabs=partial(_slabs_ahead, item, reading)) if is_long else item


def _slabs_ahead(item: Item, reading: ThreadPoolExecutor) -> Iterator[Tensor]:
    slab_iterator = iter(item.slabs())
    next_slab = reading.submit(next, slab_iterator, None)
    while (slab := next_slab.result()) is not None:
        next_slab = reading.submit(next, slab_iterator, None)
        yield slab


def with_progress(items: Sequence[Item], on_progress: Progress | None) -> list[Item]:
    """Return items that report each slab to ``on_progress`` after the caller has used it."""
    if on_progress is None:
        return list(items)
    total, done = sum(item.num_bytes for item in items), 0

    def watched(item: Item) -> Iterator[Tensor]:
        nonlocal done
        for slab in item.slabs():
            yield slab
            done += slab.numel() * slab.element_size()
            on_progress(done, total, item.name)

    return [replace(item, slabs=partial(watched, item)) for item in items]


def named_with_progress(
    sizes: Mapping[str, int], on_progress: Progress | None, doing: str
) -> Iterator[str]:
    """Yield the names one by one; report each to ``on_progress`` when the caller continues."""
    total, done = sum(sizes.values()), 0
    for name, num_bytes in sizes.items():
        yield name
        done += num_bytes
        if on_progress is not None:
            on_progress(done, total, f"{doing} {name}")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal dtype, shape and bits; NaN equals itself."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    # Compare eight bytes at a time: comparing single bytes takes as long as reading.
    wide = a.numel() // 8 * 8
    return torch.equal(a[:wide].view(torch.int64), b[:wide].view(torch.int64)) and torch.equal(
        a[wide:], b[wide:]
    )


def same_tensors(theirs: Rows, one: str, other: str) -> bool:
    """Whether two tensors of a source have equal dtype, shape and bits."""
    shape = theirs.entries[one].shape
    return shape == theirs.entries[other].shape and all(
        same_bits(theirs.rows(one, *rows), theirs.rows(other, *rows))
        for rows in row_groups(shape)
    )


def compare_copy(theirs: Rows, name: str, original: str) -> None:
    """Raise ValueError unless a foreign tensor equals its original."""
    if not same_tensors(theirs, name, original):
        remedy = (
            "layers of multi-token prediction share the model's weights. Remove "
            "num_nextn_predict_layers and these layers from the folder."
            if name.startswith("model.layers.")
            else "config.json ties the two: set tie_word_embeddings to false if the head has "
            "separate weights."
        )
        raise ValueError(f"{name} differs from {original}, although {remedy}")
