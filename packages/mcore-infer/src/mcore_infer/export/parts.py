"""Tensors for a rank of another engine, put together from ranges of logical tensors.

A ``TensorRange`` is a range of rows and columns of one logical tensor. Ranges
that follow each other in memory make a tensor: the queries, keys and values of a rank, or
experts on a new first dimension. Bytes come by groups of rows, so no tensor is ever held whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mcore_ckpt.mapping.row_streams import Rows, row_groups
from mcore_ckpt.storage.files import DTYPES, Item


@dataclass(frozen=True, slots=True)
class TensorRange:
    """A range of a logical tensor."""

    name: str
    """Logical name."""
    rows: tuple[int, int]
    """First and one-past-last row; rows beyond the tensor are zeros."""
    columns: tuple[int, int] | None = None
    """First and one-past-last column; None: all, or the tensor has one dimension."""
    shift: float = 0.0
    """Added to each number, in float32."""
    factor: float = 1.0
    """Multiplies each number, in float32."""


class RecordedRows:
    """Rows that remember of which tensors some were read."""

    def __init__(self, under: Rows) -> None:
        """Read from ``under``."""
        self._under, self.entries = under, under.entries
        self.read: set[str] = set()

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows, and note the tensor."""
        self.read.add(name)
        return self._under.rows(name, begin, stop)


def whole(rows: Rows, name: str, shift: float = 0.0) -> TensorRange:
    """Return the part that is all of a tensor."""
    return TensorRange(name, (0, rows.entries[name].shape[0]), shift=shift)


def shard(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the range of ``size`` that a rank has; ``num_ranks`` divides ``size``."""
    share = size // num_ranks
    return rank * share, (rank + 1) * share


def build_item(
    name: str, dtype: str, shape: tuple[int, ...], parts: Sequence[TensorRange], rows: Rows
) -> Item:
    """Make a tensor to write out of parts that follow each other."""
    return Item(name, dtype, shape, partial(_slabs, tuple(parts), rows, DTYPES[dtype]))


def _slabs(parts: Sequence[TensorRange], rows: Rows, dtype: torch.dtype) -> Iterator[Tensor]:
    for part in parts:
        entry = rows.entries[part.name]
        begin, stop = part.rows
        for low, high in row_groups((stop - begin, *entry.shape[1:])):
            held = _rows_or_zeros(rows, part.name, begin + low, begin + high)
            if part.columns is not None:
                held = held[:, slice(*part.columns)]
            if part.shift or part.factor != 1.0:
                held = held.float() * part.factor + part.shift
            yield _cast(part.name, held.contiguous(), dtype)


def _cast(name: str, held: Tensor, dtype: torch.dtype) -> Tensor:
    if held.dtype == torch.uint8 and dtype == torch.int8:
        return held.view(dtype)  # packed codes are bytes, whatever a format calls them
    cast = held.to(dtype)
    if dtype == torch.float16 and (cast.isinf() & ~held.isinf()).any():
        raise ValueError(
            f"{name} has numbers beyond 65504, where fp16 ends: give --dtype bf16 or fp32."
        )
    return cast


def _rows_or_zeros(rows: Rows, name: str, begin: int, stop: int) -> Tensor:
    end = rows.entries[name].shape[0]
    held = rows.rows(name, min(begin, end), min(stop, end))
    if stop <= end:
        return held
    missing = stop - max(begin, end)
    return torch.cat((held, held.new_zeros((missing, *held.shape[1:]))))
