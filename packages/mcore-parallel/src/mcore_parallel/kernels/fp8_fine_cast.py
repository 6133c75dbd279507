"""Casts of matrices to fp8 with many scales: Triton kernels and references of the same bits.

A GEMM sums along the rows of both factors, so a matrix and its transpose are cast separately,
each with scales along its own rows: one per row or column (``cast_lines_by``), or one per block
(``cast_blocks``). Blocks are 1 x 128 along the row for inputs and gradients, 128 x 128 for
weights; their scales are powers of two, rounded down. As in ``fp8_cast`` zeros stay zero;
numbers that share a scale with infinity or NaN become NaN, and so does the scale.

One pass over tiles of 128 x 128 writes both orders. A tile contains its blocks, so block scales
need no earlier pass. Scales of rows and columns need ``largest_of_lines`` first; ranks may
all-reduce its magnitudes before the cast.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple, no_type_check

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_parallel.kernels.fp8_cast import SMALLEST_AMAX
from mcore_parallel.kernels.fp8_tiles import (
    largest_bits,
    load_quarters,
    magnitude_bits,
    narrow_bytes,
    power_scales,
    store_quarters,
    store_turned,
    widened,
)
from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave

BLOCK = 128
"""Numbers that share a scale, along a row or in a square."""
_WARPS, _BLOCK_WARPS = 8, 4
_STRIP = 32, 256
"""Rows per step and columns of a program of ``_largest_of_lines``."""
_STEPS = 32, 8
"""Steps of such a program, for large matrices and for small ones."""


class FineFp8(NamedTuple):
    """A matrix in fp8 and its transpose, each with its scales; ``rows`` may be empty."""

    rows: Shaped[Tensor, "*E T D"]
    row_scales: Float[Tensor, "... _ _"]
    """Factors of ``rows``: ``[T, 1]``, ``[T, D/128]`` or ``[T/128, D/128]``."""
    columns: Shaped[Tensor, "*E D T"]
    column_scales: Float[Tensor, "... _ _"]
    """Factors of ``columns``: ``[D, 1]``, ``[D, T/128]`` or ``[D/128, T/128]``."""


@triton.jit
@no_type_check
def _ordered(bits, KIND: tl.constexpr):
    # As int32 the bits of non-negative float32 numbers are ordered like the numbers.
    return widened(bits, KIND).to(tl.int32, bitcast=True)


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
    # A program reads STEPS x HEIGHT rows of WIDTH columns; WIDTH is so small that one warp
    # reduces a row.
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
        bits = magnitude_bits(value)
        most = tl.maximum(most, bits)
        tops = _ordered(tl.max(bits, 1), value.dtype)
        tl.atomic_max(row_tops + row, tops, mask=row < num_rows, sem="relaxed")
    tops = _ordered(tl.max(most, 0), x.dtype.element_ty)
    tl.atomic_max(column_tops + column, tops, mask=column < width, sem="relaxed")


@triton.jit
@no_type_check
def _scales(bits, LIMIT: tl.constexpr, SMALLEST: tl.constexpr):
    top = bits.to(tl.float32, bitcast=True)
    is_finite = top < float("inf")  # false for NaN, whose sign bit a maximum may have set
    top = tl.maximum(top, SMALLEST)
    limit = tl.full(top.shape, LIMIT, tl.float32)
    scale, inverse = tl.div_rn(limit, top), tl.div_rn(top, limit)
    return tl.where(is_finite, scale, float("nan")), tl.where(is_finite, inverse, float("nan"))


@triton.jit
@no_type_check
def _cast_lines(
    x,
    row_tops,
    column_tops,
    rows,
    columns,
    row_scales,
    column_scales,
    num_rows,
    width,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    COMPILED: tl.constexpr,
    TILE: tl.constexpr,
):
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    matrix = tl.program_id(2).to(tl.int64)
    # Offsets of this matrix of the stack in the tops and scales of rows and of columns.
    tall, wide = matrix * num_rows, matrix * width
    x, rows, columns = x + tall * width, rows + tall * width, columns + tall * width
    row, column = down * TILE + tl.arange(0, TILE), across * TILE + tl.arange(0, TILE)
    is_row, is_column = row < num_rows, column < width
    inside = is_row[:, None] & is_column[None, :]
    index = row[:, None] * width + column[None, :]
    value = tl.load(x + index, mask=inside, other=0.0)
    if HAS_ROWS:
        tops = tl.load(row_tops + tall + row, mask=is_row, other=0)
        scale, inverse = _scales(tops, LIMIT, SMALLEST)
        tl.store(row_scales + tall + row, inverse, mask=is_row)
        narrow = narrow_bytes(value.to(tl.float32) * scale[:, None], IS_E4M3, COMPILED)
        tl.store(rows + index, narrow, mask=inside)
    if HAS_COLUMNS:
        # Transposed in 16 bits before the cast: ptxas 12.8 drops casts that it transposes by
        # bytes.
        transposed = tl.trans(value)
        tops = tl.load(column_tops + wide + column, mask=is_column, other=0)
        scale, inverse = _scales(tops, LIMIT, SMALLEST)
        tl.store(column_scales + wide + column, inverse, mask=is_column)
        index = column[:, None] * num_rows + row[None, :]
        inside = is_column[:, None] & is_row[None, :]
        narrow = narrow_bytes(transposed.to(tl.float32) * scale[:, None], IS_E4M3, COMPILED)
        tl.store(columns + index, narrow, mask=inside)


@triton.jit
@no_type_check
def _store_block_rows(
    value, row, column, rows, scales, width, SMALLEST: tl.constexpr, IS_E4M3: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    tops = widened(tl.max(magnitude_bits(value), 1), value.dtype)
    scale, inverse = power_scales(tops, SMALLEST, IS_E4M3)
    tl.store(scales + row, inverse)
    narrow = narrow_bytes(value.to(tl.float32) * scale[:, None], IS_E4M3, COMPILED)
    tl.store(rows + row[:, None] * width + column[None, :], narrow)


@triton.jit
@no_type_check
def _cast_blocks(
    x,
    rows,
    columns,
    row_scales,
    column_scales,
    num_rows,
    width,
    SMALLEST: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    COMPILED: tl.constexpr,
    TILE: tl.constexpr,
):
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    word = down * (TILE // 4) + tl.arange(0, TILE // 4)
    column = across * TILE + tl.arange(0, TILE)
    a, b, c, d = load_quarters(x, word, column, width)
    if HAS_ROWS:
        # Scales [T, D/128] are stored by columns: block ``across`` has num_rows of them.
        to, row = row_scales + across * num_rows, word * 4
        _store_block_rows(a, row, column, rows, to, width, SMALLEST, IS_E4M3, COMPILED)
        _store_block_rows(b, row + 1, column, rows, to, width, SMALLEST, IS_E4M3, COMPILED)
        _store_block_rows(c, row + 2, column, rows, to, width, SMALLEST, IS_E4M3, COMPILED)
        _store_block_rows(d, row + 3, column, rows, to, width, SMALLEST, IS_E4M3, COMPILED)
    if HAS_COLUMNS:
        # The tile has 128 rows, so each of its columns is one block of the transpose.
        tops = widened(tl.max(largest_bits(a, b, c, d), 0), x.dtype.element_ty)
        scale, inverse = power_scales(tops, SMALLEST, IS_E4M3)
        tl.store(column_scales + down * width + column, inverse)
        scale = scale[None, :]
        a, b = a.to(tl.float32) * scale, b.to(tl.float32) * scale
        c, d = c.to(tl.float32) * scale, d.to(tl.float32) * scale
        store_turned(columns, a, b, c, d, word, column, num_rows, IS_E4M3, COMPILED)


@triton.jit
@no_type_check
def _cast_squares(
    x,
    rows,
    columns,
    row_scales,
    column_scales,
    num_rows,
    width,
    row_stride,
    column_stride,
    SMALLEST: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    COMPILED: tl.constexpr,
    TILE: tl.constexpr,
):
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    word = down * (TILE // 4) + tl.arange(0, TILE // 4)
    column = across * TILE + tl.arange(0, TILE)
    a, b, c, d = load_quarters(x, word, column, width)
    # The tile is one square: both orders have the same scale.
    top = widened(tl.max(tl.max(largest_bits(a, b, c, d), 0), 0), x.dtype.element_ty)
    scale, inverse = power_scales(top, SMALLEST, IS_E4M3)
    a, b = a.to(tl.float32) * scale, b.to(tl.float32) * scale
    c, d = c.to(tl.float32) * scale, d.to(tl.float32) * scale
    if HAS_ROWS:
        tl.store(row_scales + down * row_stride + across, inverse)
        store_quarters(rows, a, b, c, d, word, column, width, IS_E4M3, COMPILED)
    if HAS_COLUMNS:
        tl.store(column_scales + across * column_stride + down, inverse)
        store_turned(columns, a, b, c, d, word, column, num_rows, IS_E4M3, COMPILED)


def _largest_plain(
    x: Float[Tensor, "*E T D"],
) -> tuple[Float[Tensor, "*E T"], Float[Tensor, "*E D"]]:
    wide = x.abs().to(torch.promote_types(x.dtype, torch.float32))
    return wide.amax(-1), wide.amax(-2)


def _cast_lines_plain(
    x: Float[Tensor, "*E T D"],
    row_tops: Float[Tensor, "*E T"],
    column_tops: Float[Tensor, "*E D"],
    dtype: torch.dtype,
    *,
    has_rows: bool = True,
) -> FineFp8:
    """Compute ``cast_lines_by`` in plain torch."""
    rows, row_scales = scaled_by_tops(x, row_tops[..., None], dtype, is_power=False)
    columns, column_scales = scaled_by_tops(x.mT, column_tops[..., None], dtype, is_power=False)
    whole = FineFp8(rows, row_scales, columns, column_scales)
    return whole if has_rows else _without_rows(whole)


def _cast_blocks_plain(
    x: Float[Tensor, "T D"],
    dtype: torch.dtype,
    *,
    is_square: bool = False,
    has_rows: bool = True,
) -> FineFp8:
    """Compute ``cast_blocks`` in plain torch."""
    whole = FineFp8(
        *_cast_in_blocks(x, dtype, is_square), *_cast_in_blocks(x.t(), dtype, is_square)
    )
    return whole if has_rows else _without_rows(whole)


def _cast_in_blocks(x: Tensor, dtype: torch.dtype, is_square: bool) -> tuple[Tensor, Tensor]:
    down, across = x.shape
    height = BLOCK if is_square else 1
    blocks = x.reshape(down // height, height, across // BLOCK, BLOCK)
    tops = blocks.abs().amax((1, 3), keepdim=True)
    narrow, scales = scaled_by_tops(blocks, tops, dtype, is_power=True)
    return narrow.reshape(x.shape), scales[:, 0, :, 0]


def _without_rows(whole: FineFp8) -> FineFp8:
    return whole._replace(rows=whole.rows.new_empty(0, 0))


def scaled_by_tops(
    x: Float[Tensor, "..."], tops: Float[Tensor, "..."], dtype: torch.dtype, *, is_power: bool
) -> tuple[Shaped[Tensor, "..."], Float[Tensor, "..."]]:
    """Cast numbers to fp8 by known magnitudes; return the numbers and the inverse scales.

    Args:
        x: floating.
        tops: magnitudes that are mapped to the format's largest number, of x's dtype or wider,
            broadcastable to x.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        is_power: whether to round scales down to powers of two.

    Returns:
        The fp8 numbers, contiguous, and the factors that dequantize them.
    """
    limit = torch.finfo(dtype).max
    wide = torch.promote_types(x.dtype, torch.float32)
    floor = tops.to(wide).clamp(min=SMALLEST_AMAX)
    # Tensor by tensor: with a Python number torch multiplies by a rounded reciprocal instead.
    top = torch.full_like(floor, limit)
    scale, inverse = top / floor, floor / top
    if is_power:
        # frexp gives scale = m * 2^e with 0.5 <= m < 1: the power of two below is 2^(e - 1).
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
        inverse = torch.ones_like(scale) / scale
    scale, inverse = (torch.where(tops.isfinite(), s, float("nan")) for s in (scale, inverse))
    return (x.to(wide) * scale).clamp(-limit, limit).to(dtype).contiguous(), inverse


def dequantized_lines(
    fp8: Shaped[Tensor, "T D"], scales: Float[Tensor, "_ _"]
) -> Float[Tensor, "T D"]:
    """Return an fp8 matrix times its scales of rows or blocks, in the dtype of the scales."""
    down, across = (
        -(-size // count) for size, count in zip(fp8.shape, scales.shape, strict=True)
    )
    whole = scales.repeat_interleave(down, 0).repeat_interleave(across, 1)
    return fp8.to(scales.dtype) * whole


def _kind(x: Tensor) -> tuple[torch.dtype] | None:
    return (x.dtype,) if x.element_size() == 2 else None


def _largest_samples(
    device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Sample]:
    yield Sample(3.0 * wave(256, 384, device=device, dtype=dtype))


def _line_samples(
    device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Sample]:
    x = 3.0 * wave(256, 384, device=device, dtype=dtype)
    for narrow in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield Sample(x, *_largest_plain(x), narrow)


def _block_samples(
    device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Sample]:
    x = 3.0 * wave(256, 384, device=device, dtype=dtype)
    for narrow in (torch.float8_e4m3fn, torch.float8_e5m2):
        for is_square in (False, True):
            yield Sample(x, narrow, is_square=is_square)


@optional_kernel(
    "largest magnitudes of rows and columns for fp8",
    reference=_largest_plain,
    kind=_kind,
    samples=_largest_samples,
)
def largest_of_lines(
    x: Float[Tensor, "*E T D"],
) -> tuple[Float[Tensor, "*E T"], Float[Tensor, "*E D"]]:
    """Return the largest magnitude of every row and of every column, float32 or wider.

    Args:
        x: contiguous; one matrix, or a stack of matrices.
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


@optional_kernel(
    "casts to fp8 by rows and columns",
    reference=_cast_lines_plain,
    kind=_kind,
    samples=_line_samples,
)
def cast_lines_by(
    x: Float[Tensor, "*E T D"],
    row_tops: Float[Tensor, "*E T"],
    column_tops: Float[Tensor, "*E D"],
    dtype: torch.dtype,
    *,
    has_rows: bool = True,
) -> FineFp8:
    """Cast a matrix and its transpose to fp8, with one scale per row of each.

    Args:
        x: contiguous; one matrix, or a stack of matrices.
        row_tops: largest magnitude of each row.
        column_tops: largest magnitude of each column.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        has_rows: whether to write the matrix in its own order, not only its transpose.
    """
    num_rows, width = x.shape[-2:]
    scales = torch.empty_like(row_tops), torch.empty_like(column_tops)
    rows, columns = _outputs(x, has_rows)
    _cast_lines[-(-num_rows // BLOCK), -(-width // BLOCK), prod(x.shape[:-2])](
        x,
        row_tops.view(torch.int32),
        column_tops.view(torch.int32),
        rows,
        columns,
        *scales,
        num_rows,
        width,
        torch.finfo(dtype).max,
        SMALLEST_AMAX,
        dtype == torch.float8_e4m3fn,
        has_rows,
        True,  # HAS_COLUMNS
        x.is_cuda,
        BLOCK,
        num_warps=_WARPS,
    )
    return FineFp8(
        rows.view(dtype), scales[0][..., None], columns.view(dtype), scales[1][..., None]
    )


@optional_kernel(
    "casts to fp8 by blocks", reference=_cast_blocks_plain, kind=_kind, samples=_block_samples
)
def cast_blocks(
    x: Float[Tensor, "T D"],
    dtype: torch.dtype,
    *,
    is_square: bool = False,
    has_rows: bool = True,
) -> FineFp8:
    """Cast a matrix and its transpose to fp8, with one scale per block of each.

    The kernel stores scales in the memory order that GEMMs read: ``[T, D/128]`` by columns,
    scales of squares by rows padded to a multiple of 4.

    Args:
        x: contiguous; sizes are multiples of ``BLOCK``.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        is_square: whether blocks are 128 x 128 squares; else 1 x 128 along rows.
        has_rows: whether to write the matrix in its own order too, not only its transpose.
    """
    kernel: Any = _cast_squares if is_square else _cast_blocks
    num_rows, width = x.shape
    down, across = num_rows // BLOCK, width // BLOCK
    factory_kwargs = {"dtype": torch.float32, "device": x.device}
    rows, columns = _outputs(x, has_rows)
    constants = SMALLEST_AMAX, dtype == torch.float8_e4m3fn, has_rows, True, x.is_cuda, BLOCK
    # The transpose is written in words.
    outputs = rows, columns.view(torch.int32)
    if is_square:
        strides = -(-across // 4) * 4, -(-down // 4) * 4
        scales = (
            torch.zeros(down, strides[0], **factory_kwargs),
            torch.zeros(across, strides[1], **factory_kwargs),
        )
        sizes = num_rows, width, *strides
    else:
        scales = (
            torch.empty(across, num_rows, **factory_kwargs),
            torch.empty(down, width, **factory_kwargs),
        )
        sizes = num_rows, width
    kernel[down, across](x, *outputs, *scales, *sizes, *constants, num_warps=_BLOCK_WARPS)
    rows, columns = rows.view(dtype), columns.view(dtype)
    if is_square:
        return FineFp8(rows, scales[0][:, :across], columns, scales[1][:, :down])
    return FineFp8(rows, scales[0].t(), columns, scales[1].t())


def _outputs(x: Tensor, has_rows: bool) -> tuple[Tensor, Tensor]:
    *lead, num_rows, width = x.shape
    new: dict[str, Any] = {"dtype": torch.uint8, "device": x.device}
    rows = torch.empty((*lead, num_rows, width) if has_rows else (0, 0), **new)
    return rows, torch.empty(*lead, width, num_rows, **new)
