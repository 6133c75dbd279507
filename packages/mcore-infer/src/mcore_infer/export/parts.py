"""Builds tensors for a rank of another engine from ranges of logical tensors.

A ``TensorRange`` is a range of rows and columns of one logical tensor. Several ranges, one
after another, form a tensor to write: the queries, keys and values of a rank, or experts on a
new first dimension. Groups of rows are streamed, so no complete tensor is in memory.
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
    """Rows and columns of a logical tensor, and the linear map applied to their numbers."""

    name: str
    """Logical name."""
    rows: tuple[int, int]
    """First and one-past-last row; rows beyond the tensor are zeros."""
    columns: tuple[int, int] | None = None
    """First and one-past-last column; None: all, or the tensor has one dimension."""
    shift: float = 0.0
    """Added to each number after the factor, in float32."""
    factor: float = 1.0
    """Multiplies each number, in float32."""


class RecordedRows:
    """Reads rows and records the names of their tensors."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self.entries = rows, rows.entries
        self.read: set[str] = set()

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows, and record the name of their tensor."""
        self.read.add(name)
        return self._rows.rows(name, begin, stop)


def full_range(rows: Rows, name: str, shift: float = 0.0) -> TensorRange:
    """Return the range of a complete tensor."""
    return TensorRange(name, (0, rows.entries[name].shape[0]), shift=shift)


def shard(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return a rank's range of ``size``, which ``num_ranks`` divides."""
    share = size // num_ranks
    return rank * share, (rank + 1) * share


def build_item(
    name: str, dtype: str, shape: tuple[int, ...], parts: Sequence[TensorRange], rows: Rows
) -> Item:
    """Return the item that writes one tensor: its ranges in order, cast to ``dtype``."""
    return Item(name, dtype, shape, partial(_slabs, tuple(parts), rows, DTYPES[dtype]))


def _slabs(parts: Sequence[TensorRange], rows: Rows, dtype: torch.dtype) -> Iterator[Tensor]:
    for part in parts:
        entry = rows.entries[part.name]
        begin, stop = part.rows
        for low, high in row_groups((stop - begin, *entry.shape[1:])):
            values = _rows_or_zeros(rows, part.name, begin + low, begin + high)
            if part.columns is not None:
                values = values[:, slice(*part.columns)]
            if part.shift or part.factor != 1.0:
                values = values.float() * part.factor + part.shift
            yield _cast(part.name, values.contiguous(), dtype)


def _cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    if values.dtype == torch.uint8 and dtype == torch.int8:
        return values.view(dtype)  # packed codes are bytes; some formats declare them as int8
    cast = values.to(dtype)
    if dtype == torch.float16 and (cast.isinf() & ~values.isinf()).any():
        raise ValueError(
            f"{name} has numbers above 65504, the largest of fp16: give --dtype bf16 or fp32."
        )
    return cast


def _rows_or_zeros(rows: Rows, name: str, begin: int, stop: int) -> Tensor:
    end = rows.entries[name].shape[0]
    values = rows.rows(name, min(begin, end), min(stop, end))
    if stop <= end:
        return values
    missing = stop - max(begin, end)
    return torch.cat((values, values.new_zeros((missing, *values.shape[1:]))))
