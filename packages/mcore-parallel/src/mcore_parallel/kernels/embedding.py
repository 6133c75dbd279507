"""The gradient of an embedding (adds rows to a table by id): Triton kernel and reference.

The ids are sorted, so that one program adds all rows of one id in the order of the tokens.
Since there are no atomics, every run gives the same bits. Only rows of the table whose ids
occur are read and written.
"""

from collections.abc import Iterator
from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave

_BLOCK = 1024
_CHUNK = 8


@triton.jit
@no_type_check
def _add_rows(
    total, ids, order, rows, num_rows, limit, width, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    # A program adds one block of columns of one run of equal sorted ids: the run that begins at
    # ``begin``. Programs that begin inside a run, or at an id outside the table, do nothing.
    begin = tl.program_id(0)
    own_id = tl.load(ids + begin)
    previous_id = tl.load(ids + begin - 1, mask=begin > 0, other=-1)
    if (own_id != previous_id) & (own_id >= 0) & (own_id < limit):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        target = total + own_id * width + column
        result = tl.load(target, mask=inside, other=0.0)
        if result.dtype != tl.float64:
            result = result.to(tl.float32)
        first_row = rows + tl.load(order + begin) * width + column
        result += tl.load(first_row, mask=inside, other=0.0).to(result.dtype)
        begin += 1
        # Most ids occur once and skip this slower loop, which adds CHUNK rows at a time until a
        # chunk is not full.
        next_id = tl.load(ids + begin, mask=begin < num_rows, other=-1)
        num_same = tl.where(next_id == own_id, CHUNK, 0)
        while num_same == CHUNK:
            index = begin + tl.arange(0, CHUNK)
            same = tl.load(ids + index, mask=index < num_rows, other=-1) == own_id
            source = tl.load(order + index, mask=same, other=0)
            tile = tl.load(
                rows + source[:, None] * width + column[None, :],
                mask=same[:, None] & inside[None, :],
                other=0.0,
            )
            result += tl.sum(tile.to(result.dtype), 0)
            num_same = tl.sum(same.to(tl.int32), 0)
            begin += CHUNK
        tl.store(target, result.to(total.dtype.element_ty), mask=inside)


def add_rows_plain(
    total: Float[Tensor, "v D"], ids: Int[Tensor, " T"], rows: Float[Tensor, "T D"]
) -> None:
    """Compute ``add_rows_`` in plain torch."""
    is_row = (ids >= 0) & (ids < total.shape[0])
    masked_rows = rows.to(total.dtype).where(is_row.unsqueeze(-1), 0.0)
    total.index_add_(0, ids.where(is_row, 0), masked_rows)


def _samples(device: torch.device) -> Iterator[Sample]:
    ids = torch.tensor([2, 0, 2, 9], device=device)
    rows = wave(4, 16, device=device, dtype=torch.bfloat16)
    yield Sample(wave(3, 16, device=device, dtype=torch.float32), ids, rows)


@optional_kernel(
    "the embedding's gradient in Triton",
    reference=add_rows_plain,
    kind=lambda: (),
    samples=_samples,
)
def add_rows_(
    total: Float[Tensor, "v D"], ids: Int[Tensor, " T"], rows: Float[Tensor, "T D"]
) -> None:
    """Add each of ``rows`` to the row of ``total`` at its id, in place.

    Every run gives the same bits: rows of one id are added in order.

    Args:
        total: contiguous; accumulated in float32, or in float64 if ``total`` is float64.
        ids: int64; rows with an id outside ``total`` are skipped.
        rows: any floating dtype.
    """
    if ids.numel() == 0:
        return
    ordered, order = torch.sort(ids, stable=True)
    grid = (ids.numel(), triton.cdiv(total.shape[1], _BLOCK))
    _add_rows[grid](
        total,
        ordered,
        order,
        rows.contiguous(),
        ids.numel(),
        total.shape[0],
        total.shape[1],
        _CHUNK,
        _BLOCK,
        num_warps=4,
    )
