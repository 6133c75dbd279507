"""Triton kernel that adds rows to the rows of a table by id, with the same bits in every run.

The gradient of an embedding is such a sum. Ids are sorted, so that one program holds all
rows of one id and adds them in the order of the tokens: no atomics, hence the same bits
in every run, and only the rows that occur are read and written. The reference is
``embedding.add_rows_plain``; this module is imported only where tensors are on a GPU.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

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


def add_rows(
    total: Float[Tensor, "v D"], ids: Int[Tensor, " T"], rows: Float[Tensor, "T D"]
) -> None:
    """Add each row to the row of ``total`` that its id names, in place.

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
