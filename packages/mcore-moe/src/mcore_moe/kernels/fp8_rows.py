"""Triton kernel that casts rows to fp8, each by its largest magnitude.

The reference is ``fp8_rows.cast_rows_plain``.
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
    # The factor of a row and its inverse; NaN for a row with infinity. Tiny rows are scaled as
    # if their largest number were _SMALLEST, so that the factor stays finite.
    top = tl.maximum(top, _SMALLEST)
    is_finite = top < float("inf")
    largest = tl.zeros_like(top) + _LARGEST
    scale = tl.where(is_finite, tl.div_rn(largest, top), float("nan"))
    return scale, tl.where(is_finite, tl.div_rn(top, largest), float("nan"))


@triton.jit
@no_type_check
def _cast(x, numbers, scales, width, BLOCK: tl.constexpr):
    # One program: one row, read once, kept in registers between its maximum and its cast.
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
    """Return rows in e4m3, and the scales that dequantize them.

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
