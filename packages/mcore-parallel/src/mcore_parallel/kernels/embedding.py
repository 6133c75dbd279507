"""The gradient of an embedding, rows added to a table by id: Triton kernel and reference.

The kernel sorts the ids, so that one program holds all rows of one id and adds them in the
order of the tokens: no atomics, hence the same bits in every run, and only the rows that occur
are read and written.
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
    # One program: the columns of a block, of the run of equal ids that begins here, if any.
    begin = tl.program_id(0)
    mine = tl.load(ids + begin)
    before = tl.load(ids + begin - 1, mask=begin > 0, other=-1)
    if (mine != before) & (mine >= 0) & (mine < limit):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        at = total + mine * width + column
        result = tl.load(at, mask=inside, other=0.0)
        if result.dtype != tl.float64:
            result = result.to(tl.float32)
        own = rows + tl.load(order + begin) * width + column
        result += tl.load(own, mask=inside, other=0.0).to(result.dtype)
        begin += 1
        # Most ids occur once: only those that do not go on to the slower loop.
        following = tl.load(ids + begin, mask=begin < num_rows, other=-1)
        found = tl.where(following == mine, CHUNK, 0)
        while found == CHUNK:
            place = begin + tl.arange(0, CHUNK)
            same = tl.load(ids + place, mask=place < num_rows, other=-1) == mine
            source = tl.load(order + place, mask=same, other=0)
            tile = tl.load(
                rows + source[:, None] * width + column[None, :],
                mask=same[:, None] & inside[None, :],
                other=0.0,
            )
            result += tl.sum(tile.to(result.dtype), 0)
            found = tl.sum(same.to(tl.int32), 0)
            begin += CHUNK
        tl.store(at, result.to(total.dtype.element_ty), mask=inside)


def add_rows_plain(
    total: Float[Tensor, "v D"], ids: Int[Tensor, " T"], rows: Float[Tensor, "T D"]
) -> None:
    """Compute ``add_rows_`` in plain torch."""
    is_row = (ids >= 0) & (ids < total.shape[0])
    kept = rows.to(total.dtype).where(is_row.unsqueeze(-1), 0.0)
    total.index_add_(0, ids.where(is_row, 0), kept)


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
    """Add each row to the row of ``total`` that its id names, in place and in its dtype.

    Every run gives the same bits: rows of one id are added in their order.

    Args:
        total: contiguous; sums are made in float32, or in float64 if it is that.
        ids: int64; rows whose id is no row of ``total`` are left out.
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
