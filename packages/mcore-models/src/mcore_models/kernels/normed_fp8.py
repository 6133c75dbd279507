"""Triton kernel that norms rows whose statistics are known, and casts them to fp8.

The kernel of the norm reads the stream once, for its sum and the scale of each row. This one
reads the sum again and writes what a linear multiplies, in both orders: the normed rows are
never in memory in 16 bits. The bits are those of ``norm`` and ``fp8_cast`` in turn.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.kernels.fp8_tiles import empty_outputs, load_quarters, one_scale, store_both
from mcore_parallel.precision.fp8_cast import SMALLEST_AMAX, Fp8

_WORDS, _COLUMNS, _WARPS = 32, 64, 8
"""Words of the transpose, columns and warps of a program."""


@triton.jit
@no_type_check
def _normed(value, scales, row, is_row, factor):
    scale = tl.load(scales + row, mask=is_row, other=0.0)
    # As ``norm._forward`` rounds: the row's scale first, then the weight.
    return (value.to(tl.float32) * scale[:, None] * factor[None, :]).to(value.dtype)


@triton.jit
@no_type_check
def _norm_and_cast(
    x,
    scales,
    weight,
    amax,
    seen,
    rows,
    columns,
    scale_inv,
    num_rows,
    width,
    offset,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    COMPILED: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = word < num_rows // 4, column < width
    inside = is_row[:, None] & is_column[None, :]
    a, b, c, d = load_quarters(x, word, column, width, inside)
    factor = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32) + offset
    row = word * 4
    a, b = (
        _normed(a, scales, row, is_row, factor),
        _normed(b, scales, row + 1, is_row, factor),
    )
    c, d = (
        _normed(c, scales, row + 2, is_row, factor),
        _normed(d, scales, row + 3, is_row, factor),
    )
    scale = one_scale(amax, scale_inv, LIMIT, SMALLEST)
    store_both(
        rows, columns, a, b, c, d, scale, seen, word, column, width, num_rows,
        IS_E4M3, HAS_ROWS, HAS_SEEN, COMPILED, inside,
    )  # fmt: skip


def cast_by(
    x: Float[Tensor, "T D"],
    scales: Float[Tensor, " T"],
    weight: Float[Tensor, " D"],
    offset: float,
    amax: Float[Tensor, " 1"],
    dtype: torch.dtype,
    *,
    has_rows: bool = True,
    seen: Float[Tensor, " 1"] | None = None,
) -> Fp8:
    """Cast ``x * scales * (weight + offset)``, rounded to x's dtype first.

    Args:
        x: contiguous, 16 bits; T is a multiple of 4.
        scales: one for each row, float32.
        weight: of the norm.
        offset: added to it.
        amax: the magnitude that becomes the format's largest number.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        has_rows: whether to write the matrix in its own order, not only its transpose.
        seen: float32, 0 or above; raised in place to the largest magnitude. What is not
            finite is then NaN, and its neighbours in the kernel's tile with it.
    """
    num_rows, width = x.shape
    rows, columns, scale_inv = empty_outputs(num_rows, width, x.device, has_rows=has_rows)
    _norm_and_cast[triton.cdiv(num_rows, 4 * _WORDS), triton.cdiv(width, _COLUMNS)](
        x,
        scales,
        weight,
        amax,
        (amax if seen is None else seen).view(torch.int32),
        rows,
        columns,
        scale_inv,
        num_rows,
        width,
        offset,
        torch.finfo(dtype).max,
        SMALLEST_AMAX,
        dtype == torch.float8_e4m3fn,
        seen is not None,
        has_rows,
        x.is_cuda,
        _WORDS,
        _COLUMNS,
        num_warps=_WARPS,
    )
    return Fp8(rows.view(dtype), columns.view(dtype), scale_inv)
