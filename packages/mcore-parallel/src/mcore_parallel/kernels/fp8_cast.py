"""Casts to fp8 by one scale: Triton kernels and references, which give the same bits.

The scale maps the largest magnitude to the largest number of the format: 448 in e4m3, 57344 in
e5m2. Values are clamped before the cast, since torch's casts do not saturate. A matrix of zeros
stays zero. A matrix with infinity or NaN becomes NaN, and its scale too, so that every product
with it is NaN, as in 16 bits; clamping would hide the fault. If the scale comes from earlier
steps, only the numbers that are not finite become NaN.

A matrix takes two passes, both limited by memory traffic: ``largest_magnitude`` reads it,
``cast_by`` reads it again and writes one byte per element in each of the two memory orders. The
scale is computed on the device from the largest magnitude, so ranks may all-reduce the
magnitude between the passes. ``cast_flat`` and ``dequantize_flat`` convert flat memory to fp8
and back.
"""

from collections.abc import Iterator
from typing import NamedTuple, no_type_check

import torch
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
from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave

_LANES, _LANE_WARPS, _MOST_PROGRAMS = 4096, 8, 4096
_TILE, _TILE_WARPS = 128, 8
_FORMATS = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_AMAX = 2.0**-100
"""Lower bound of the magnitude that a scale is computed from."""


class Fp8(NamedTuple):
    """A matrix in fp8, in both orders."""

    rows: Shaped[Tensor, "T D"]
    """Empty if only the transpose was requested."""
    columns: Shaped[Tensor, "D T"]
    """The transpose, contiguous: tensor cores read both factors along the summed dimension."""
    scale_inv: Float[Tensor, " 1"]
    """Factor that dequantizes both; float32, float64 for a float64 matrix."""


@triton.jit
@no_type_check
def _largest(x, out, size, LANES: tl.constexpr):
    # Bits of non-negative floats are ordered as the floats are, infinity and NaN on top.
    lane = tl.arange(0, LANES)
    top = tl.zeros([LANES], tl.int32)
    # From the end to the beginning: the cache still holds the end of x, which its producer
    # wrote last, and afterwards the beginning of x, which ``_cast`` reads first.
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
    # A word of the transpose is 4 rows of one column, see ``fp8_tiles``.
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
    index = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    scale, _ = both_scales(amax, LIMIT, SMALLEST)
    value = tl.load(x + index, mask=index < size, other=0.0).to(tl.float32) * scale
    tl.store(out + index, narrow_bytes(value, IS_E4M3, COMPILED), mask=index < size)


@triton.jit
@no_type_check
def _widen(
    x, amax, out, size, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, LANES: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    _, inverse = both_scales(amax, LIMIT, SMALLEST)
    value = tl.load(x + index, mask=index < size, other=0.0).to(tl.float32) * inverse
    tl.store(out + index, value.to(out.dtype.element_ty), mask=index < size)


def cast_plain(x: Float[Tensor, "T D"], amax: Float[Tensor, " 1"], dtype: torch.dtype) -> Fp8:
    """Cast a matrix by a known largest magnitude, in plain torch."""
    rows, scale_inv = cast_rows(x, amax, dtype)
    return Fp8(rows, rows.t().contiguous(), scale_inv)


def cast_rows(
    x: Float[Tensor, "..."], amax: Float[Tensor, " 1"], dtype: torch.dtype
) -> tuple[Shaped[Tensor, "..."], Float[Tensor, " 1"]]:
    """Cast a tensor in its own order, in plain torch; return it and its scale's inverse."""
    limit = torch.finfo(dtype).max
    wide = torch.promote_types(x.dtype, torch.float32)
    floor = amax.to(wide).clamp(min=SMALLEST_AMAX)
    # Tensor by tensor: with a Python number torch multiplies by a rounded reciprocal instead.
    top = torch.full_like(floor, limit)
    scale, scale_inv = (
        torch.where(amax.isfinite(), s, float("nan")) for s in (top / floor, floor / top)
    )
    scaled = torch.where(x.isfinite(), x, float("nan")).to(wide) * scale
    return scaled.clamp(-limit, limit).to(dtype), scale_inv


def dequantized(
    fp8: Shaped[Tensor, "*T"], scale_inv: Float[Tensor, " 1"]
) -> Float[Tensor, "*T"]:
    """Return fp8 numbers times their scale, in the dtype of the scale."""
    return fp8.to(scale_inv.dtype) * scale_inv


def _largest_plain(x: Float[Tensor, "..."]) -> Float[Tensor, " 1"]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.abs().amax().to(wide).view(1)  # NaN stays


def _cast_by_plain(
    x: Float[Tensor, "T D"],
    amax: Float[Tensor, " 1"],
    dtype: torch.dtype,
    *,
    has_rows: bool = True,
    seen: Float[Tensor, " 1"] | None = None,
) -> Fp8:
    if seen is not None:
        seen.copy_(torch.maximum(seen, _largest_plain(x)))
    whole = cast_plain(x, amax, dtype)
    return whole if has_rows else whole._replace(rows=whole.rows.new_empty(0, 0))


def _cast_flat_plain(
    x: Float[Tensor, " T"], amax: Float[Tensor, " 1"], out: Shaped[Tensor, " T"]
) -> None:
    out.copy_(cast_rows(x, amax, out.dtype)[0])


def _dequantize_flat_plain(
    x: Shaped[Tensor, " T"], amax: Float[Tensor, " 1"], out: Float[Tensor, " T"]
) -> None:
    _, scale_inv = cast_rows(amax.new_zeros(1), amax, x.dtype)
    out.copy_(dequantized(x, scale_inv))


def _kind(x: Tensor) -> tuple[torch.dtype] | None:
    return None if x.dtype == torch.float64 else (x.dtype,)


def _cast_kind(x: Tensor) -> tuple[torch.dtype] | None:
    # The transpose is written in words of 4 bytes.
    return None if x.dtype == torch.float64 or x.shape[0] % 4 else (x.dtype,)


def _largest_samples(
    device: torch.device, dtype: torch.dtype = torch.float32
) -> Iterator[Sample]:
    yield Sample(3.0 * wave(160, 272, device=device, dtype=dtype))


def _cast_samples(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[Sample]:
    x = 3.0 * wave(160, 272, device=device, dtype=dtype)
    for narrow in _FORMATS:
        yield Sample(x, _largest_plain(x), narrow)
    yield Sample(x, _largest_plain(x), narrow, has_rows=False, seen=_largest_plain(x) / 2)


def _flat_samples(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[Sample]:
    x = 3.0 * wave(5000, device=device, dtype=dtype)
    for narrow in _FORMATS:
        yield Sample(x, _largest_plain(x), torch.empty(5000, device=device, dtype=narrow))


def _fp8_samples(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[Sample]:
    x = 3.0 * wave(5000, device=device, dtype=torch.float32)
    for narrow in _FORMATS:
        numbers, _ = cast_rows(x, _largest_plain(x), narrow)
        yield Sample(numbers, _largest_plain(x), torch.empty_like(x, dtype=dtype))


@optional_kernel(
    "largest magnitudes for fp8", reference=_largest_plain, kind=_kind, samples=_largest_samples
)
def largest_magnitude(x: Float[Tensor, "..."]) -> Float[Tensor, " 1"]:
    """Return the largest magnitude of a contiguous tensor; NaN if any element is NaN.

    The result is float32, or float64 for a float64 tensor.
    """
    bits = torch.zeros(1, dtype=torch.int32, device=x.device)
    programs = min(triton.cdiv(x.numel(), _LANES), _MOST_PROGRAMS)
    _largest[(programs,)](x, bits, x.numel(), _LANES, num_warps=_LANE_WARPS)
    return bits.view(torch.float32)


@optional_kernel(
    "casts of matrices to fp8", reference=_cast_by_plain, kind=_cast_kind, samples=_cast_samples
)
def cast_by(
    x: Float[Tensor, "T D"],
    amax: Float[Tensor, " 1"],
    dtype: torch.dtype,
    *,
    has_rows: bool = True,
    seen: Float[Tensor, " 1"] | None = None,
) -> Fp8:
    """Cast a matrix to fp8 in both memory orders.

    Args:
        x: contiguous.
        amax: magnitude that is mapped to the format's largest number: that of x, or of an
            earlier tensor.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        has_rows: whether to write ``[T, D]`` too, not only the transpose.
        seen: float32, not negative; raised in place to the largest magnitude of x if that is
            larger. Numbers that are not finite become NaN, and in the kernel their tile too.
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
        SMALLEST_AMAX,
        dtype == torch.float8_e4m3fn,
        has_rows,
        seen is not None,
        x.is_cuda,
        _TILE,
        num_warps=_TILE_WARPS,
    )
    return Fp8(rows.view(dtype), columns.view(dtype), scale_inv)


@optional_kernel(
    "casts of flat memory to fp8", reference=_cast_flat_plain, kind=_kind, samples=_flat_samples
)
def cast_flat(
    x: Float[Tensor, " T"], amax: Float[Tensor, " 1"], out: Shaped[Tensor, " T"]
) -> None:
    """Cast flat memory to fp8 by a known magnitude.

    Args:
        x: contiguous.
        amax: magnitude that is mapped to the format's largest number.
        out: ``float8_e4m3fn`` or ``float8_e5m2``; overwritten.
    """
    constants = torch.finfo(out.dtype).max, SMALLEST_AMAX, out.dtype == torch.float8_e4m3fn
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


@optional_kernel(
    "dequantizing flat fp8 memory",
    reference=_dequantize_flat_plain,
    kind=lambda out: None if out.dtype == torch.float64 else (out.dtype,),
    samples=_fp8_samples,
)
def dequantize_flat(
    x: Shaped[Tensor, " T"], amax: Float[Tensor, " 1"], out: Float[Tensor, " T"]
) -> None:
    """Undo ``cast_flat``: convert fp8 numbers to ``out`` by the same magnitude.

    Args:
        x: ``float8_e4m3fn`` or ``float8_e5m2``, contiguous.
        amax: magnitude that was mapped to the format's largest number.
        out: overwritten.
    """
    _widen[(triton.cdiv(x.numel(), _LANES),)](
        x,
        amax,
        out,
        x.numel(),
        torch.finfo(x.dtype).max,
        SMALLEST_AMAX,
        _LANES,
        num_warps=_LANE_WARPS,
    )
