"""Triton kernels that cast rows, or columns, to fp8, each by its largest magnitude.

The reference is ``fp8_rows.cast_rows_plain``, of the transposed matrices for columns.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(2.0**-100)


@triton.jit
@no_type_check
def _factors(top):
    # What a row is multiplied by, and what gives it back; NaN where it holds infinity.
    top = tl.maximum(top, _SMALLEST)
    is_finite = top < float("inf")
    largest = tl.zeros_like(top) + _LARGEST
    scale = tl.where(is_finite, tl.div_rn(largest, top), float("nan"))
    return scale, tl.where(is_finite, tl.div_rn(top, largest), float("nan"))


@triton.jit
@no_type_check
def _cast(x, numbers, scales, width, BLOCK: tl.constexpr):
    # One program: a row, which stays in registers between its two uses.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    part = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale, inverse = _factors(tl.max(tl.abs(part), 0))
    part = tl.clamp(part * scale, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(numbers + row * width + column, part.to(numbers.dtype.element_ty), mask=inside)
    tl.store(scales + row, inverse)


def fused_cast_rows(
    x: Float[Tensor, "*R D"],
) -> tuple[Shaped[Tensor, "*R D"], Float[Tensor, "*R 1"]]:
    """Return rows in e4m3 and the scales that multiply them to give the rows back.

    Args:
        x: contiguous; up to 65 536 columns.
    """
    numbers = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    if x.numel():
        block = triton.next_power_of_2(x.shape[-1])
        warps = min(16, max(1, block // 512))
        _cast[(scales.numel(),)](x, numbers, scales, x.shape[-1], block, num_warps=warps)
    return numbers, scales


@triton.jit
@no_type_check
def _cast_columns(x, numbers, scales, height, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    # One program: some columns of one matrix, read twice, the second time from the cache.
    matrix = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    row = tl.arange(0, HEIGHT)
    is_column = column < width
    x += matrix * height * width
    numbers += matrix * height * width
    top = tl.zeros((WIDTH,), dtype=tl.float32)
    for begin in range(0, height, HEIGHT):
        at = begin + row
        inside = (at < height)[:, None] & is_column[None, :]
        part = tl.load(x + at[:, None] * width + column[None, :], mask=inside, other=0.0)
        part = tl.abs(part.to(tl.float32))
        top = tl.maximum(top, tl.max(part, 0))
    scale, inverse = _factors(top)
    for begin in range(0, height, HEIGHT):
        at = begin + row
        inside = (at < height)[:, None] & is_column[None, :]
        part = tl.load(x + at[:, None] * width + column[None, :], mask=inside, other=0.0)
        part = part.to(tl.float32) * scale[None, :]
        part = tl.clamp(part, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        part = tl.trans(part.to(numbers.dtype.element_ty))
        place = numbers + column[:, None].to(tl.int64) * height + at[None, :]
        tl.store(place, part, mask=is_column[:, None] & (at < height)[None, :])
    tl.store(scales + matrix * width + column, inverse, mask=is_column)


def fused_cast_columns(
    x: Float[Tensor, "e N K"],
) -> tuple[Shaped[Tensor, "e K N"], Float[Tensor, "e K 1"]]:
    """Return the transposed matrices as ``fused_cast_rows`` would, without a copy of them.

    Args:
        x: contiguous; fewer than 2**31 numbers a matrix.
    """
    experts, height, width = x.shape
    numbers = x.new_empty(experts, width, height, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(experts, width, 1, dtype=torch.float32)
    if x.numel():
        grid = (triton.cdiv(width, 64), experts)
        _cast_columns[grid](x, numbers, scales, height, width, 128, 64, num_warps=8)
    return numbers, scales
