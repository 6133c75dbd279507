"""Tensors in flight: rows of a folder read, cast, renamed and turned, never all at once.

What a ``Link`` of the rules says, done on slabs of rows. Only transposed matrices are held
whole, one at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from mcore_ckpt.boxes import Box, shifted
from mcore_ckpt.files import DTYPES, SLAB_BYTES, Reader
from mcore_ckpt.index import TensorEntry
from mcore_ckpt.planning import plan_reads
from mcore_ckpt.rules import Link


class Source:
    """Tensors of a folder, read by rows, cast on the way."""

    def __init__(
        self, reader: Reader, entries: Mapping[str, TensorEntry], cast: str = ""
    ) -> None:
        self._reader = reader
        self.entries = entries
        self._cast = cast

    def dtype(self, name: str) -> str:
        """Name of the dtype that rows come in."""
        stored = self.entries[name].dtype
        is_float = DTYPES[stored].is_floating_point
        return self._cast if self._cast and is_float else stored

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows ``begin`` to ``stop``; a tensor without dimensions is one row."""
        entry = self.entries[name]
        box: Box = ((), ())
        if entry.shape:
            zeros = (0,) * (len(entry.shape) - 1)
            box = ((begin, *zeros), (stop - begin, *entry.shape[1:]))
        out = torch.empty(box[1], dtype=DTYPES[entry.dtype])
        for read in plan_reads(entry, box):
            view = out
            for dim, (o, n) in enumerate(zip(*shifted(read.box, box[0]), strict=True)):
                view = view.narrow(dim, o, n)
            self._reader.read(name, entry, entry.chunks[read.chunk], read.box, view)
        return out.to(DTYPES[self.dtype(name)])


def row_groups(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Cut a tensor into groups of rows that are small enough to hold."""
    total = shape[0] if shape else 1
    step = max(1, SLAB_BYTES // max(8, prod(shape[1:]) * 8))
    return [(row, min(row + step, total)) for row in range(0, total, step)]


def slabs(source: Source, name: str) -> Iterator[Tensor]:
    """Give a tensor by groups of rows."""
    for begin, stop in row_groups(source.entries[name].shape):
        yield source.rows(name, begin, stop)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one dtype, shape and content; NaN equals itself."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    # Eight bytes at a time: comparing single bytes takes as long as reading them.
    wide = a.numel() // 8 * 8
    return torch.equal(a[:wide].view(torch.int64), b[:wide].view(torch.int64)) and torch.equal(
        a[wide:], b[wide:]
    )


def our_slabs(link: Link, number: int, theirs: Source) -> Iterator[Tensor]:
    """Give one of our tensors of a link, by rows, from the foreign tensor."""
    entry = theirs.entries[link.theirs]
    first, stop = link.rows(entry.shape)[number]
    if link.transposed and len(entry.shape) > 1:
        matrix = theirs.rows(link.theirs, 0, entry.shape[0])
        yield matrix.t()[first:stop].contiguous()
        return
    for begin, end in row_groups((stop - first, *entry.shape[1:])):
        yield theirs.rows(link.theirs, first + begin, first + end)


def their_slabs(link: Link, ours: Source) -> Iterator[Tensor]:
    """Give the foreign tensor of a link, by rows, from ours."""
    shapes = [ours.entries[name].shape for name in link.ours]
    if link.transposed and len(shapes[0]) > 1:
        parts = [ours.rows(n, 0, s[0]) for n, s in zip(link.ours, shapes, strict=True)]
        yield torch.cat(parts).t().contiguous()
        return
    for name, shape in zip(link.ours, shapes, strict=True):
        for begin, end in row_groups(shape):
            yield ours.rows(name, begin, end)


def prove(links: Sequence[Link], theirs: Source, ours: Source) -> None:
    """Turn ours back and compare with theirs; one of the two was written from the other.

    Raises:
        RuntimeError: naming the first tensor that differs.
    """
    for link in links:
        done = 0
        entry = theirs.entries[link.theirs]
        for slab in their_slabs(link, ours):
            rows = slab.shape[0] if slab.dim() else 1
            there = theirs.rows(link.theirs, done, done + rows)
            if not same_bits(slab, there):
                raise RuntimeError(
                    f"proof failed: {link.theirs} is not what {', '.join(link.ours)} give "
                    "on the way back. The output was not kept."
                )
            done += rows
        if done != (entry.shape[0] if entry.shape else 1):
            raise RuntimeError(f"proof failed: {link.theirs} came back with {done} rows")


def compare_copy(theirs: Source, name: str, original: str) -> None:
    """Check that a foreign tensor is what it should be a copy of.

    Raises:
        ValueError: if it differs.
    """
    one, other = theirs.entries[name], theirs.entries[original]
    same = one.shape == other.shape and all(
        same_bits(theirs.rows(name, *rows), theirs.rows(original, *rows))
        for rows in row_groups(one.shape)
    )
    if not same:
        raise ValueError(
            f"{name} is present and differs from {original}, though config.json ties the two: "
            "set tie_word_embeddings to false if the head is a weight of its own."
        )
