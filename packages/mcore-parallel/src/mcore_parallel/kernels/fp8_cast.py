"""Triton kernels that cast a matrix to fp8 by its largest magnitude, transposed on the way.

Two passes at the memory limit: ``largest`` reads the matrix, ``cast_by`` reads it again and
writes one byte an element for each of the two orders, in one pass over tiles. The scale is
computed on the device from the largest magnitude, so ranks may reduce that in between.
``narrow`` and ``widen`` cast flat memory there and back. The plain references, which give the
same bits, are ``cast_plain``, ``cast_rows`` and ``dequantized`` of ``precision.fp8_cast``.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_parallel.kernels.fp8_tiles import (
    both_scales,
    empty_outputs,
    load_quarters,
    narrow_bytes,
    one_scale,
    store_both,
)

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
    seen,
    num_rows,
    width,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    COMPILED: tl.constexpr,
    TILE: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64) * (TILE // 4) + tl.arange(0, TILE // 4)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (word < num_rows // 4)[:, None] & (column < width)[None, :]
    a, b, c, d = load_quarters(x, word, column, width, inside)
    scale = one_scale(amax, scale_inv, LIMIT, SMALLEST)
    store_both(
        rows, columns, a, b, c, d, scale, seen, word, column, width, num_rows,
        IS_E4M3, HAS_ROWS, HAS_SEEN, COMPILED, inside,
    )  # fmt: skip


@triton.jit
@no_type_check
def _narrow(
    x, amax, out, size, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, IS_E4M3: tl.constexpr,
    COMPILED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    scale, _ = both_scales(amax, LIMIT, SMALLEST)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * scale
    tl.store(out + at, narrow_bytes(value, IS_E4M3, COMPILED), mask=at < size)


@triton.jit
@no_type_check
def _widen(
    x, amax, out, size, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, LANES: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    _, inverse = both_scales(amax, LIMIT, SMALLEST)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * inverse
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < size)


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
    seen: Float[Tensor, " 1"] | None = None,
) -> tuple[Shaped[Tensor, "_ _"], Shaped[Tensor, "_ _"], Float[Tensor, " 1"]]:
    """Cast a matrix to fp8.

    Args:
        x: contiguous, float32 or 16 bits; T is a multiple of 4.
        amax: the magnitude that becomes the format's largest number: x's own, or an earlier
            tensor's.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        has_rows: whether to write ``[T, D]``; else it is empty.
        seen: float32, 0 or above; raised in place to x's own largest magnitude. What is not
            finite is then NaN, and its neighbours in the kernel's tile with it.

    Returns:
        The cast matrix, its transpose, and what multiplies either to give x back: NaN where x
        has a number that is not finite.
    """
    num_rows, width = x.shape
    rows, columns, scale_inv = empty_outputs(num_rows, width, x.device, has_rows=has_rows)
    _cast[triton.cdiv(num_rows, _TILE), triton.cdiv(width, _TILE)](
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
        seen is not None,
        x.is_cuda,
        _TILE,
        num_warps=_TILE_WARPS,
    )
    return rows.view(dtype), columns.view(dtype), scale_inv


def narrow(
    x: Float[Tensor, " T"], amax: Float[Tensor, " 1"], out: Shaped[Tensor, " T"]
) -> None:
    """Cast numbers into fp8 memory by a known magnitude, in their own order.

    Args:
        x: contiguous, float32 or 16 bits.
        amax: the magnitude that becomes the format's largest number.
        out: ``float8_e4m3fn`` or ``float8_e5m2``; written.
    """
    constants = torch.finfo(out.dtype).max, _SMALLEST, out.dtype == torch.float8_e4m3fn
    _narrow[(triton.cdiv(x.numel(), _LANES),)](
        x,
        amax,
        out.view(torch.uint8),
        x.numel(),
        *constants,
        x.is_cuda,
        _LANES,
        num_warps=_LANE_WARPS,
    )


def widen(x: Shaped[Tensor, " T"], amax: Float[Tensor, " 1"], out: Float[Tensor, " T"]) -> None:
    """Write what fp8 numbers stand for, which were cast by a known magnitude.

    Args:
        x: ``float8_e4m3fn`` or ``float8_e5m2``, contiguous.
        amax: see ``narrow``.
        out: float32 or 16 bits; written.
    """
    _widen[(triton.cdiv(x.numel(), _LANES),)](
        x,
        amax,
        out,
        x.numel(),
        torch.finfo(x.dtype).max,
        _SMALLEST,
        _LANES,
        num_warps=_LANE_WARPS,
    )
