"""Views of tensors, computed while reading: renamed and cut, resized, cast, dequantized.

Each view has the interface ``Rows`` of the rows that it reads, so that views compose. Only
transposed matrices are held completely in memory, one at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from mcore_ckpt.mapping.low_bits import decode, unpack
from mcore_ckpt.mapping.row_streams import Rows, row_groups
from mcore_ckpt.mapping.rules import Link, our_shape, split_index
from mcore_ckpt.storage.files import DTYPES, SLAB_BYTES, Item
from mcore_ckpt.storage.index import DTYPE_BYTES, TensorEntry

_FP8 = "F8_E4M3"
_BLOCKS, _SCALES = "_blocks", "_scales"


class RenamedRows:
    """Logical tensors, read from foreign tensors by links."""

    def __init__(self, links: Sequence[Link], theirs: Rows) -> None:
        """Compute and check shapes; values are read later.

        Raises:
            ValueError: if a foreign tensor has another number of rows than its link.
        """
        self._theirs = theirs
        self._links: dict[str, tuple[Link, int]] = {}
        self._held: tuple[str, Tensor] = ("", torch.empty(0))
        self.entries: dict[str, TensorEntry] = {}
        for link in links:
            entry = theirs.entries[link.theirs]
            shape = our_shape(entry.shape, link.transposed)
            for number, rows in enumerate(link.shares(entry.shape)):
                name = link.ours[number]
                self._links[name] = (link, number)
                logical_shape = (rows, *shape[1:]) if shape else ()
                self.entries[name] = TensorEntry(logical_shape, entry.dtype, ())

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows of a logical tensor."""
        link, number = self._links[name]
        shape = self._theirs.entries[link.theirs].shape
        first = link.rows(shape)[number][0]
        if link.is_plain or not shape:
            return self._theirs.rows(link.theirs, first + begin, first + stop)
        if link.head_rows:
            # Read complete heads [low, high), reorder each head, and cut out [begin, stop).
            H = len(link.head_rows)
            low, high = begin // H * H, -(-stop // H) * H
            heads = self._theirs.rows(link.theirs, low, high).unflatten(0, (-1, H))
            order = torch.tensor(link.head_rows).argsort()
            return heads[:, order].flatten(0, 1)[begin - low : stop - low].contiguous()
        # The foreign rows are ``groups`` blocks. Each block has ``shares[0]`` rows of the first
        # logical tensor, then ``shares[1]`` of the second, and so on, such as q, k and v of a
        # group of heads.
        shares = [rows // link.groups for rows in link.shares(shape)]
        block, share = sum(shares), shares[number]
        if link.transposed:
            matrix = self._matrix(link.theirs).t()
            if link.groups > 1:
                parts = matrix.unflatten(0, (link.groups, block)).split(shares, dim=1)
                return parts[number].flatten(0, 1)[begin:stop].contiguous()
            return matrix[first + begin : first + stop].contiguous()
        # Read the blocks [low, high) that contain the rows, take this tensor's share of each
        # block, and cut off the rows before ``begin`` and from ``stop`` on.
        low, high = begin // share, -(-stop // share)
        blocks = self._theirs.rows(link.theirs, low * block, high * block)
        share_rows = blocks.unflatten(0, (high - low, block)).split(shares, dim=1)[number]
        return share_rows.flatten(0, 1)[begin - low * share : stop - low * share].contiguous()

    def _matrix(self, name: str) -> Tensor:
        if self._held[0] != name:
            self._held = (name, self._theirs.rows(name, 0, self._theirs.entries[name].shape[0]))
        return self._held[1]


def their_items(links: Sequence[Link], ours: Rows) -> list[Item]:
    """Return the foreign tensors of links as items to write, computed from logical tensors."""
    items = []
    for link in links:
        shapes = [ours.entries[name].shape for name in link.ours]
        rows = sum(s[0] for s in shapes) + link.padding if shapes[0] else 0
        stacked = (rows, *shapes[0][1:]) if shapes[0] else ()
        dtype = ours.entries[link.ours[0]].dtype
        shape = our_shape(stacked, link.transposed)
        items.append(Item(link.theirs, dtype, shape, partial(their_slabs, link, ours)))
    return items


def stacked_items(items: Sequence[Item]) -> list[Item]:
    """Join successive items ``X[0]``, ``X[1]``, ... into one tensor ``X``."""
    joined: list[Item] = []
    for stem, group in groupby(items, key=lambda item: split_index(item.name)[0]):
        parts = list(group)
        if not split_index(parts[0].name)[1]:
            joined += parts
            continue
        shape = (len(parts), *parts[0].shape)
        joined.append(Item(stem, parts[0].dtype, shape, partial(_one_by_one, parts)))
    return joined


def _one_by_one(items: Sequence[Item]) -> Iterator[Tensor]:
    for item in items:
        yield from item.slabs()


def their_slabs(link: Link, ours: Rows) -> Iterator[Tensor]:
    """Yield the foreign tensor of a link by rows, computed from the logical tensors."""
    shapes = [ours.entries[name].shape for name in link.ours]
    if link.transposed and len(shapes[0]) > 1:
        parts = [ours.rows(n, 0, s[0]) for n, s in zip(link.ours, shapes, strict=True)]
        if link.groups > 1:
            blocks = [p.unflatten(0, (link.groups, -1)) for p in parts]
            parts = [torch.cat(blocks, dim=1).flatten(0, 1)]
        yield torch.cat(parts).t().contiguous()
    elif link.groups > 1:
        yield from _blocks(link, ours)
    elif link.head_rows:
        yield from _reordered(link, ours)
    else:
        for name, shape in zip(link.ours, shapes, strict=True):
            for begin, end in row_groups(shape):
                yield ours.rows(name, begin, end)
    if link.padding:
        padding = (link.padding, *shapes[0][1:])
        for begin, end in row_groups(padding):
            dtype = DTYPES[ours.entries[link.ours[0]].dtype]
            yield torch.zeros((end - begin, *padding[1:]), dtype=dtype)


def _blocks(link: Link, ours: Rows) -> Iterator[Tensor]:
    shapes = [ours.entries[name].shape for name in link.ours]
    shares = [shape[0] // link.groups for shape in shapes]
    row_bytes = prod(shapes[0][1:]) * DTYPE_BYTES[ours.entries[link.ours[0]].dtype]
    step = max(1, SLAB_BYTES // max(1, sum(shares) * row_bytes))
    for low in range(0, link.groups, step):
        high = min(low + step, link.groups)
        parts = [
            ours.rows(name, low * share, high * share).unflatten(0, (high - low, share))
            for name, share in zip(link.ours, shares, strict=True)
        ]
        yield torch.cat(parts, dim=1).flatten(0, 1).contiguous()


def _reordered(link: Link, ours: Rows) -> Iterator[Tensor]:
    (name,), H = link.ours, len(link.head_rows)
    shape, order = ours.entries[name].shape, torch.tensor(link.head_rows)
    row_bytes = prod(shape[1:]) * DTYPE_BYTES[ours.entries[name].dtype]
    step = H * max(1, SLAB_BYTES // max(1, H * row_bytes))
    for begin in range(0, shape[0], step):
        heads = ours.rows(name, begin, min(begin + step, shape[0])).unflatten(0, (-1, H))
        yield heads[:, order].flatten(0, 1).contiguous()


class ResizedTensors:
    """Tensors, some with rows removed or rows of zeros appended."""

    def __init__(self, under: Rows, num_rows: Mapping[str, int]) -> None:
        """Set the number of rows of the tensors in ``num_rows``; absent names are ignored."""
        self._under = under
        self.entries: dict[str, TensorEntry] = {
            name: replace(entry, shape=(num_rows[name], *entry.shape[1:]), chunks=())
            if name in num_rows and entry.shape[0] != num_rows[name]
            else entry
            for name, entry in under.entries.items()
        }

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows; those beyond the tensor are zeros."""
        entry = self._under.entries[name]
        end = entry.shape[0] if entry.shape else 1
        rows = self._under.rows(name, min(begin, end), min(stop, end))
        if stop <= end:
            return rows
        zeros = rows.new_zeros((stop - max(begin, end), *entry.shape[1:]))
        return torch.cat((rows, zeros))


class Cast:
    """Tensors with floating-point values cast to another dtype."""

    def __init__(self, under: Rows, dtype: str) -> None:
        self._under, self._dtype = under, dtype
        self.entries: dict[str, TensorEntry] = {
            name: replace(entry, dtype=dtype, chunks=())
            if entry.dtype != dtype and DTYPES[entry.dtype].is_floating_point
            else entry
            for name, entry in under.entries.items()
        }

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows and cast them."""
        rows = self._under.rows(name, begin, stop)
        cast = rows.to(DTYPES[self.entries[name].dtype])
        # From float32 to bf16 numbers cannot overflow, except by rounding.
        is_narrow = cast.dtype == torch.float16 or rows.dtype == torch.float64
        if is_narrow and (cast.isinf() & ~rows.isinf()).any():
            raise ValueError(
                f"{name} has numbers beyond {torch.finfo(cast.dtype).max:.5g}, the largest of "
                f"{self._dtype}: cast to bf16, or leave the dtype unchanged."
            )
        return cast


class ScaledTensors:
    """Dequantizes fp8 weights with one scale for the tensor or for each row.

    ``X`` is read as ``X * X_scale`` (``X_scale_inv`` in folders of transformers), computed in
    float32; the scales of weights and inputs are hidden.
    """

    _KINDS = ("_scale", "_scale_inv")
    _OF_INPUTS = (".input_scale", ".activation_scale", ".act_scale")

    def __init__(self, under: Rows, dtype: str = "BF16") -> None:
        """Pair weights with their scales.

        Raises:
            ValueError: if a weight has no scale, or a scale of another shape.
        """
        self._under, self._dtype = under, dtype
        self._scales: dict[str, str] = {}
        for name, entry in under.entries.items():
            if entry.dtype != _FP8:
                continue
            scales = [name + kind for kind in self._KINDS if name + kind in under.entries]
            num_scales = prod(under.entries[scales[0]].shape) if scales else 0
            if num_scales not in (1, entry.shape[0]):
                raise ValueError(
                    f"{name} is quantized: its scale {name}{self._KINDS[0]} must have one "
                    f"number or {entry.shape[0]}, one a row, and has {num_scales}."
                )
            self._scales[name] = scales[0]
        hidden = set(self._scales.values())
        self.entries: dict[str, TensorEntry] = {
            name: replace(entry, dtype=dtype, chunks=()) if name in self._scales else entry
            for name, entry in under.entries.items()
            if name not in hidden and not name.endswith(self._OF_INPUTS)
        }

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows, times their scales."""
        codes = self._under.rows(name, begin, stop)
        if name not in self._scales:
            return codes
        scale = self._scales[name]
        is_one = prod(self._under.entries[scale].shape) == 1
        part = (0, 1) if is_one else (begin, stop)
        factors = self._under.rows(scale, *part).float().reshape(-1, *(1,) * (codes.dim() - 1))
        return (codes.float() * factors).to(DTYPES[self._dtype])


class DequantizedTensors:
    """Dequantizes fp8 weights with one scale for each block of rows and columns.

    ``X`` is read as ``X * X_scale_inv``, each scale repeated over its block, computed in
    float32; the scales are hidden.

    Reference:
        DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 3.3.2. arXiv:2412.19437.
    """

    _SCALE = "_scale_inv"

    def __init__(self, under: Rows, block: tuple[int, int], dtype: str = "BF16") -> None:
        """Pair weights with their scales.

        Raises:
            ValueError: if a scale has no fp8 weight, a weight has no scale, or their shapes do
                not fit ``block``.
        """
        self._under, self._block, self._dtype = under, block, dtype
        scales = {name for name in under.entries if name.endswith(self._SCALE)}
        self.entries: dict[str, TensorEntry] = {}
        for name, entry in under.entries.items():
            if name in scales:
                if name.removesuffix(self._SCALE) not in under.entries:
                    raise ValueError(f"{name} is the scale of a tensor that is missing.")
                continue
            if entry.dtype != _FP8:
                self.entries[name] = entry
                continue
            scale_shape = tuple(-(-n // b) for n, b in zip(entry.shape, block, strict=True))
            scale = under.entries.get(name + self._SCALE)
            if scale is None or scale.shape != scale_shape:
                actual = "absent" if scale is None else f"{list(scale.shape)}"
                raise ValueError(
                    f"{name} is quantized: its scales {name}{self._SCALE} must be "
                    f"{list(scale_shape)} for blocks of {list(block)}, and are {actual}."
                )
            self.entries[name] = replace(entry, dtype=dtype, chunks=())

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows, times their scales."""
        codes = self._under.rows(name, begin, stop)
        if self._under.entries[name].dtype != _FP8:
            return codes
        tall, wide = self._block
        low, high = begin // tall, -(-stop // tall)
        scales = self._under.rows(name + self._SCALE, low, high).float()
        scales = scales.repeat_interleave(tall, 0)[begin - low * tall : stop - low * tall]
        scales = scales.repeat_interleave(wide, 1)[:, : codes.shape[1]]
        return (codes.float() * scales).to(DTYPES[self._dtype])


class UnpackedMxfp4:
    """Dequantizes experts in MXFP4, as of gpt-oss, to matrices ``X[e]`` ``[in, out]``.

    ``X_blocks`` ``[E, out, in/32, 16]`` has two codes of four bits in a byte, the even one in
    the low half, and ``X_scales`` ``[E, out, in/32]`` has the exponent of each block plus 127.

    Reference:
        Open Compute Project 2023, Microscaling Formats (MX) Specification 1.0, section 5.3.3.
    """

    def __init__(self, under: Rows, dtype: str = "BF16") -> None:
        self._under, self._dtype = under, dtype
        self.entries: dict[str, TensorEntry] = {}
        for name, entry in under.entries.items():
            stem = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
            if stem == name:
                self.entries[name] = entry
            elif name.endswith(_BLOCKS):
                self._add(stem, entry, under.entries)
            elif stem + _BLOCKS not in under.entries:
                raise ValueError(f"{name} is the scale of a tensor that is missing.")

    def _add(self, stem: str, blocks: TensorEntry, entries: Mapping[str, TensorEntry]) -> None:
        scales = entries.get(stem + _SCALES)
        fits = len(blocks.shape) == 4 and blocks.shape[3] == 16 and blocks.dtype == "U8"
        if not fits or scales is None or scales.shape != blocks.shape[:3]:
            actual = "absent" if scales is None else f"{list(scales.shape)}"
            raise ValueError(
                f"{stem}{_BLOCKS} of shape {list(blocks.shape)} must be [experts, out, in/32, "
                f"16] bytes, and its scales the same without the last; they are {actual}."
            )
        experts, rows, groups, _ = blocks.shape
        for expert in range(experts):
            shape = (32 * groups, rows)
            self.entries[f"{stem}[{expert}]"] = TensorEntry(shape, self._dtype, ())

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows; unpacks the complete matrix of the expert."""
        if name in self._under.entries:
            return self._under.rows(name, begin, stop)
        stem, (expert,) = split_index(name)
        packed = self._under.rows(stem + _BLOCKS, expert, expert + 1)[0]
        exponents = self._under.rows(stem + _SCALES, expert, expert + 1)[0]
        codes = unpack(packed.flatten(1), "e2m1").unflatten(1, (-1, 32))  # [out, in/32, 32]
        wide = torch.ldexp(decode(codes, "e2m1"), exponents.int().unsqueeze(-1) - 127)
        return wide.flatten(1).t()[begin:stop].to(DTYPES[self._dtype]).contiguous()
