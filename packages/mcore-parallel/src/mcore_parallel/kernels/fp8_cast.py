"""Triton kernels that cast a matrix to fp8 by its largest magnitude, transposed on the way.

Two passes at the memory limit: ``largest`` reads the matrix, ``cast_by`` reads it again and
writes one byte an element for each of the two orders, in one pass over tiles. The scale is
computed on the device from the largest magnitude, so ranks may reduce that in between. The
plain reference is ``precision.fp8_cast.cast_plain``, which gives the same bits.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

_LANES, _LANE_WARPS, _MOST_PROGRAMS = 4096, 8, 4096
_TILE, _TILE_WARPS = 128, 8
_SMALLEST = 2.0**-100


@triton.jit
@no_type_check
def _largest(x, out, size, LANES: tl.constexpr):
    # Bits of non-negative floats are ordered as the floats are, infinity and NaN on top.
    lane = tl.arange(0, LANES)
    top = tl.zeros([LANES], tl.int32)
    # From the end to the begin: the cache still has what was written last, and ``_cast``
    # begins with what is read last here.
    start = (tl.cdiv(size, LANES) - 1 - tl.program_id(0)).to(tl.int64) * LANES
    step = tl.num_programs(0).to(tl.int64) * LANES
    while start >= 0:
        value = tl.load(x + start + lane, mask=start + lane < size, other=0.0).to(tl.float32)
        top = tl.maximum(top, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        start -= step
    tl.atomic_max(out, tl.max(top, 0), sem="relaxed")


@triton.jit
@no_type_check
def _cast(
    x,
    amax,
    rows,
    columns,
    scale_inv,
    num_rows,
    width,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    top = tl.load(amax)
    is_finite = top < float("inf")  # false for NaN
    top = tl.maximum(top, SMALLEST)
    limit = tl.full([], LIMIT, tl.float32)
    scale = tl.div_rn(limit, top)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, tl.where(is_finite, tl.div_rn(top, limit), float("nan")))
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * scale
    value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
    if IS_E4M3:
        narrow = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        narrow = value.to(tl.float8e5).to(tl.uint8, bitcast=True)
    if HAS_ROWS:
        tl.store(rows + place, narrow, mask=inside)
    if HAS_COLUMNS:
        inside = (column < width)[:, None] & (row < num_rows)[None, :]
        place = column[:, None] * num_rows + row[None, :]
        tl.store(columns + place, tl.trans(narrow), mask=inside)


def largest(x: Float[Tensor, "T D"]) -> Float[Tensor, " 1"]:
    """Return the largest magnitude in float32; NaN if there is one.

    Args:
        x: contiguous, float32 or 16 bits.
    """
    bits = torch.zeros(1, dtype=torch.int32, device=x.device)
    programs = min(triton.cdiv(x.numel(), _LANES), _MOST_PROGRAMS)
    _largest[(programs,)](x, bits, x.numel(), _LANES, num_warps=_LANE_WARPS)
    return bits.view(torch.float32)


def cast_by(
    x: Float[Tensor, "T D"],
    amax: Float[Tensor, " 1"],
    dtype: torch.dtype,
    *,
    has_rows: bool = True,
    has_columns: bool = True,
) -> tuple[Shaped[Tensor, "_ _"], Shaped[Tensor, "_ _"], Float[Tensor, " 1"]]:
    """Cast a matrix to fp8.

    Args:
        x: contiguous, float32 or 16 bits.
        amax: its largest magnitude, which becomes the format's largest number.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        has_rows: whether to write ``[T, D]``; else it is empty.
        has_columns: whether to write ``[D, T]``; else it is empty.

    Returns:
        The cast matrix, its transpose, and what multiplies either to give x back: NaN where x
        has a number that is not finite.
    """
    num_rows, width = x.shape
    rows, columns = (
        torch.empty(shape if is_there else (0, 0), dtype=torch.uint8, device=x.device)
        for shape, is_there in (((num_rows, width), has_rows), ((width, num_rows), has_columns))
    )
    scale_inv = torch.empty(1, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_rows, _TILE), triton.cdiv(width, _TILE))
    _cast[grid](
        x,
        amax,
        rows,
        columns,
        scale_inv,
        num_rows,
        width,
        torch.finfo(dtype).max,
        _SMALLEST,
        dtype == torch.float8_e4m3fn,
        has_rows,
        has_columns,
        _TILE,
        num_warps=_TILE_WARPS,
    )
    return rows.view(dtype), columns.view(dtype), scale_inv
