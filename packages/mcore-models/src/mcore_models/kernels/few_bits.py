"""Widen a matrix of 4-bit levels in one Triton kernel: codes and scales in, weights out.

A program reads bytes, two levels in each, looks both up among the 16, multiplies them by the
scale of their block of 64 and writes the rounded numbers. Bits are those of the plain form,
``peft.quantized_base.QuantizedMatrix.widened``, cast.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

_BYTES = 1024
"""Of a program."""


@triton.jit
@no_type_check
def _widen(
    codes, scales, levels, out, num_bytes, row_bytes, columns,
    IS_WHOLE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = at < num_bytes
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + at // 32, mask=inside, other=0.0)
    even = tl.load(levels + (code & 15)) * scale
    odd = tl.load(levels + (code >> 4)) * scale
    pairs = tl.interleave(even, odd).to(out.dtype.element_ty)
    place = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    there = place < 2 * num_bytes
    if not IS_WHOLE:  # rows end within a block
        row = place // (2 * row_bytes)
        column = place - row * (2 * row_bytes)
        there = there & (column < columns)
        place = row * columns + column
    tl.store(out + place, pairs, mask=there)


def widen_levels(
    codes: UInt8[Tensor, "F blocks 32"],
    scales: Float[Tensor, "F blocks 1"],
    levels: Float[Tensor, "16"],
    out: Float[Tensor, "F D"],
) -> None:
    """Write levels times scales into a contiguous matrix, whatever its dtype; D <= 64 blocks.

    Args:
        codes: contiguous; the even column's level in the low bits.
        scales: contiguous, of each 64 columns.
        levels: what codes stand for, float32.
        out: written.
    """
    columns, row_bytes = out.shape[1], codes.shape[1] * codes.shape[2]
    num_bytes = codes.numel()
    _widen[(triton.cdiv(num_bytes, _BYTES),)](
        *(codes, scales, levels, out, num_bytes, row_bytes, columns),
        IS_WHOLE=columns == 2 * row_bytes,
        BYTES=_BYTES,
        num_warps=4,
    )
