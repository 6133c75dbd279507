"""Triton kernels that cast matrices to fp8 with many scales: of rows and columns, or of blocks.

Both orders come from one pass over tiles of 128 x 128, each with the scales that its GEMM sums
along. A tile sees its blocks whole, so block scales need no pass before; those of whole rows
and columns come from ``largest_of_lines``, and ranks may reduce them in between. The plain
references are in ``precision.fp8_fine_cast``, which give the same bits.
"""

from math import prod
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

BLOCK = 128
"""Numbers that share a scale, along a row or in a square."""
_SMALLEST = 2.0**-100
_LINES, _BLOCKS, _SQUARES = 0, 1, 2
_WARPS = 8
_STRIP = 32, 256
"""Rows of a step and columns of a program that looks for the largest magnitudes."""
_STEPS = 32, 8
"""Of such a program, where there is much to read and where there is less."""


@triton.jit
@no_type_check
def _magnitude_bits(value):
    # Bits of non-negative floats are ordered as the floats are, infinity and NaN on top; as
    # integers of 16 bits they take half the registers.
    return value.to(tl.int16, bitcast=True) & 0x7FFF


@triton.jit
@no_type_check
def _widened(bits, KIND: tl.constexpr):
    # The reduction widened them. As int32 the bits of a float32 are ordered, too.
    bits = bits.to(tl.int16).to(KIND, bitcast=True)
    return bits.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
@no_type_check
def _tops(value, IS_SQUARE: tl.constexpr):
    tops = tl.max(_magnitude_bits(value), 1)
    if IS_SQUARE:
        tops = tl.zeros_like(tops) + tl.max(tops, 0)
    return _widened(tops, value.dtype)


@triton.jit
@no_type_check
def _largest_of_lines(
    x,
    row_tops,
    column_tops,
    num_rows,
    width,
    HEIGHT: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # One program: STEPS times HEIGHT rows of WIDTH columns, so few that a warp holds each row.
    column = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    matrix = tl.program_id(2).to(tl.int64)
    x += matrix * num_rows * width
    row_tops += matrix * num_rows
    column_tops += matrix * width
    most = tl.zeros((HEIGHT, WIDTH), dtype=tl.int16)
    for step in range(STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * HEIGHT + tl.arange(0, HEIGHT)
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        value = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0)
        bits = _magnitude_bits(value)
        most = tl.maximum(most, bits)
        tops = _widened(tl.max(bits, 1), value.dtype)
        tl.atomic_max(row_tops + row, tops, mask=row < num_rows, sem="relaxed")
    tops = _widened(tl.max(most, 0), x.dtype.element_ty)
    tl.atomic_max(column_tops + column, tops, mask=column < width, sem="relaxed")


@triton.jit
@no_type_check
def _scales(bits, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, IS_POWER: tl.constexpr):
    top = bits.to(tl.float32, bitcast=True)
    is_finite = bits < 0x7F800000
    top = tl.maximum(top, SMALLEST)
    limit = tl.full(top.shape, LIMIT, tl.float32)
    scale = tl.div_rn(limit, top)
    inverse = tl.div_rn(top, limit)
    if IS_POWER:  # rounded down: without its mantissa
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(tl.full(top.shape, 1.0, tl.float32), scale)
    return tl.where(is_finite, scale, float("nan")), tl.where(is_finite, inverse, float("nan"))


@triton.jit
@no_type_check
def _narrow(value, LIMIT: tl.constexpr, IS_E4M3: tl.constexpr):
    value = tl.maximum(value, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    value = tl.minimum(value, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if IS_E4M3:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return value.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
@no_type_check
def _cast(
    x,
    row_tops,
    column_tops,
    rows,
    columns,
    row_scales,
    column_scales,
    num_rows,
    width,
    row_stride,
    column_stride,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    GRAIN: tl.constexpr,
    TILE: tl.constexpr,
):
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    matrix = tl.program_id(2).to(tl.int64)  # 0 with scales of blocks
    tall, wide = matrix * num_rows, matrix * width
    x, rows, columns = x + tall * width, rows + tall * width, columns + tall * width
    row, column = down * TILE + tl.arange(0, TILE), across * TILE + tl.arange(0, TILE)
    is_row, is_column = row < num_rows, column < width
    inside = is_row[:, None] & is_column[None, :]
    place = row[:, None] * width + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0)
    if HAS_ROWS:
        if GRAIN == 0:
            tops = tl.load(row_tops + tall + row, mask=is_row, other=0)
        else:
            tops = _tops(value, GRAIN == 2)
        scale, inverse = _scales(tops, LIMIT, SMALLEST, GRAIN > 0)
        if GRAIN == 2:
            at = row_scales + down * row_stride + across
            tl.store(at + tl.zeros_like(row), inverse, mask=row == down * TILE)
        else:
            tl.store(row_scales + tall + across * row_stride + row, inverse, mask=is_row)
        narrow = _narrow(value.to(tl.float32) * scale[:, None], LIMIT, IS_E4M3)
        tl.store(rows + place, narrow, mask=inside)
    if HAS_COLUMNS:
        # Transposed in 16 bits, not in 8: ptxas 12.8 loses casts that it transposes bytewise.
        turned = tl.trans(value)
        if GRAIN == 0:
            tops = tl.load(column_tops + wide + column, mask=is_column, other=0)
        else:
            tops = _tops(turned, GRAIN == 2)
        scale, inverse = _scales(tops, LIMIT, SMALLEST, GRAIN > 0)
        if GRAIN == 2:
            at = column_scales + across * column_stride + down
            tl.store(at + tl.zeros_like(column), inverse, mask=column == across * TILE)
        else:
            at = column_scales + wide + down * column_stride + column
            tl.store(at, inverse, mask=is_column)
        place = column[:, None] * num_rows + row[None, :]
        inside = is_column[:, None] & is_row[None, :]
        narrow = _narrow(turned.to(tl.float32) * scale[:, None], LIMIT, IS_E4M3)
        tl.store(columns + place, narrow, mask=inside)


def largest_of_lines(
    x: Float[Tensor, "*E T D"],
) -> tuple[Float[Tensor, "*E T"], Float[Tensor, "*E D"]]:
    """Return the largest magnitude of every row and of every column, in float32.

    Args:
        x: contiguous, 16 bits; one matrix, or many of one shape.
    """
    *lead, num_rows, width = x.shape
    row_tops, column_tops = (
        torch.zeros(*lead, size, dtype=torch.int32, device=x.device)
        for size in (num_rows, width)
    )
    height, columns = _STRIP
    steps = _STEPS[x.numel() < 2**28]
    grid = -(-num_rows // (height * steps)), -(-width // columns), prod(lead)
    _largest_of_lines[grid](
        x, row_tops, column_tops, num_rows, width, height, steps, columns, num_warps=_WARPS
    )
    return row_tops.view(torch.float32), column_tops.view(torch.float32)


Cast = tuple[
    Shaped[Tensor, "... _ _"],
    Float[Tensor, "... _ _"],
    Shaped[Tensor, "... _ _"],
    Float[Tensor, "... _ _"],
]
"""The matrix, its scales, its transpose and those of that; an order left out is empty."""


def cast_lines(
    x: Float[Tensor, "*E T D"],
    row_tops: Float[Tensor, "*E T"],
    column_tops: Float[Tensor, "*E D"],
    dtype: torch.dtype,
    *,
    has_rows: bool = True,
    has_columns: bool = True,
) -> Cast:
    """Cast a matrix to fp8, each row by its scale, and its transpose, each row by its own.

    Args:
        x: contiguous, 16 bits; one matrix, or many of one shape.
        row_tops: largest magnitude of each row.
        column_tops: largest magnitude of each column.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        has_rows: whether to write ``[T, D]``, with scales ``[T, 1]``.
        has_columns: whether to write ``[D, T]``, with scales ``[D, 1]``.
    """
    tops = row_tops.view(torch.int32), column_tops.view(torch.int32)
    scales = torch.empty_like(row_tops), torch.empty_like(column_tops)
    rows, columns = _launch(x, tops, scales, (0, 0), dtype, (has_rows, has_columns), _LINES)
    return rows, scales[0][..., None], columns, scales[1][..., None]


def cast_blocks(
    x: Float[Tensor, "T D"],
    dtype: torch.dtype,
    *,
    is_square: bool = False,
    has_rows: bool = True,
    has_columns: bool = True,
) -> Cast:
    """Cast a matrix to fp8 and its transpose, both in blocks along their rows or in squares.

    Args:
        x: contiguous, 16 bits; sizes are multiples of ``BLOCK``.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        is_square: share scales in squares, not along rows.
        has_rows: whether to write ``[T, D]``, with scales ``[T, D/128]`` stored by columns;
            of squares ``[T/128, D/128]`` stored by rows that are padded to 4.
        has_columns: whether to write ``[D, T]``, with scales likewise.
    """
    num_rows, width = x.shape
    down, across = num_rows // BLOCK, width // BLOCK
    place = {"dtype": torch.float32, "device": x.device}
    if is_square:
        strides = -(-across // 4) * 4, -(-down // 4) * 4
        scales = (
            torch.zeros(down, strides[0], **place),
            torch.zeros(across, strides[1], **place),
        )
    else:
        strides = num_rows, width
        scales = torch.empty(across, num_rows, **place), torch.empty(down, width, **place)
    grain = _SQUARES if is_square else _BLOCKS
    rows, columns = _launch(x, (x, x), scales, strides, dtype, (has_rows, has_columns), grain)
    if is_square:
        return rows, scales[0][:, :across], columns, scales[1][:, :down]
    return rows, scales[0].t(), columns, scales[1].t()


def _launch(
    x: Tensor,
    tops: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    strides: tuple[int, int],
    dtype: torch.dtype,
    has: tuple[bool, bool],
    grain: int,
) -> tuple[Tensor, Tensor]:
    *lead, num_rows, width = x.shape
    shapes = (*lead, num_rows, width), (*lead, width, num_rows)
    rows, columns = (
        torch.empty(shape if is_there else (0, 0), dtype=torch.uint8, device=x.device)
        for shape, is_there in zip(shapes, has, strict=True)
    )
    _cast[_grid(x)](
        x,
        *tops,
        rows,
        columns,
        *scales,
        num_rows,
        width,
        *strides,
        torch.finfo(dtype).max,
        _SMALLEST,
        dtype == torch.float8_e4m3fn,
        *has,
        grain,
        BLOCK,
        num_warps=_WARPS,
    )
    return rows.view(dtype), columns.view(dtype)


def _grid(x: Tensor) -> tuple[int, int, int]:
    num_rows, width = x.shape[-2:]
    return -(-num_rows // BLOCK), -(-width // BLOCK), prod(x.shape[:-2])
