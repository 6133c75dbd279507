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
_SEEING_TILE, _SEEING_WARPS = 64, 8
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
    seen,
    num_rows,
    width,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    IS_16_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    top = tl.load(amax)
    is_finite = top < float("inf")  # false for NaN
    top = tl.maximum(top, SMALLEST)
    limit = tl.full([], LIMIT, tl.float32)
    scale = tl.where(is_finite, tl.div_rn(limit, top), float("nan"))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, tl.where(is_finite, tl.div_rn(top, limit), float("nan")))
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    raw = tl.load(x + place, mask=inside, other=0.0)
    if HAS_SEEN:
        # As integers of the tensor's own width, in any order: a fourth of the registers.
        if IS_16_BITS:
            bits = raw.to(tl.int16, bitcast=True) & 0x7FFF
        else:
            bits = raw.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        most = tl.max(tl.reshape(bits, [TILE * TILE], can_reorder=True), 0)
        most = most.to(bits.dtype)  # which the reduction may have widened
        most = most.to(raw.dtype, bitcast=True).to(tl.float32)
        tl.atomic_max(seen, most.to(tl.int32, bitcast=True), sem="relaxed")
        # The scale is of other numbers than these, so it says nothing of them.
        scale = tl.where(most < float("inf"), scale, float("nan"))
    value = raw.to(tl.float32) * scale
    value = tl.maximum(value, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    value = tl.minimum(value, LIMIT, propagate_nan=tl.PropagateNan.ALL)
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
    seen: Float[Tensor, " 1"] | None = None,
) -> tuple[Shaped[Tensor, "_ _"], Shaped[Tensor, "_ _"], Float[Tensor, " 1"]]:
    """Cast a matrix to fp8.

    Args:
        x: contiguous, float32 or 16 bits.
        amax: the magnitude that becomes the format's largest number: x's own, or an earlier
            tensor's.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        has_rows: whether to write ``[T, D]``; else it is empty.
        has_columns: whether to write ``[D, T]``; else it is empty.
        seen: float32, 0 or above; raised in place to x's own largest magnitude. What is not
            finite is then NaN, and its neighbours in the kernel's tile with it.

    Returns:
        The cast matrix, its transpose, and what multiplies either to give x back: NaN where x
        has a number that is not finite.
    """
    num_rows, width = x.shape
    # ptxas 12.8 loses the packed casts of float32 tiles that it transposes byte by byte.
    turns_later = has_columns and x.dtype == torch.float32
    if turns_later:
        rows, _, scale_inv = cast_by(x, amax, dtype, has_columns=False, seen=seen)
        columns = rows.view(torch.uint8).t().contiguous().view(dtype)
        return rows if has_rows else rows.new_empty(0, 0), columns, scale_inv
    rows, columns = (
        torch.empty(shape if is_there else (0, 0), dtype=torch.uint8, device=x.device)
        for shape, is_there in (((num_rows, width), has_rows), ((width, num_rows), has_columns))
    )
    scale_inv = torch.empty(1, dtype=torch.float32, device=x.device)
    is_seeing = seen is not None
    tile = _SEEING_TILE if is_seeing else _TILE
    grid = (triton.cdiv(num_rows, tile), triton.cdiv(width, tile))
    _cast[grid](
        x,
        amax,
        rows,
        columns,
        scale_inv,
        amax if seen is None else seen.view(torch.int32),
        num_rows,
        width,
        torch.finfo(dtype).max,
        _SMALLEST,
        dtype == torch.float8_e4m3fn,
        has_rows,
        has_columns,
        is_seeing,
        x.element_size() == 2,
        tile,
        num_warps=_SEEING_WARPS if is_seeing else _TILE_WARPS,
    )
    return rows.view(dtype), columns.view(dtype), scale_inv
