"""Casting matrices to fp8 with many scales: of rows and columns, or of blocks of 128.

A GEMM sums along rows of both factors, so a matrix and its transpose are cast apart, each with
scales along its own rows. Blocks are 1 x 128 along the row, for inputs and gradients, or
128 x 128, for weights; their scales are powers of two, rounded down. As in ``fp8_cast`` zeros
stay zero; what shares a scale with infinity or NaN is NaN, and so is that scale.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.optional_kernels import OptionalKernel, wave, works
from mcore_parallel.precision.fp8_cast import SMALLEST_AMAX

BLOCK = 128
"""Numbers that share a scale, along a row or in a square."""


class FineFp8(NamedTuple):
    """A matrix in fp8 and its transpose, each with its scales; an order may be empty."""

    rows: Shaped[Tensor, "*E T D"]
    row_scales: Float[Tensor, "... _ _"]
    """``[T, 1]``, ``[T, D/128]`` or ``[T/128, D/128]``: multiply ``rows`` to give it back."""
    columns: Shaped[Tensor, "*E D T"]
    column_scales: Float[Tensor, "... _ _"]
    """``[D, 1]``, ``[D, T/128]`` or ``[D/128, T/128]``."""


def cast_lines(
    x: Float[Tensor, "*E T D"],
    dtype: torch.dtype,
    row_axis: Axis = SINGLE,
    column_axis: Axis = SINGLE,
    *,
    has_rows: bool = True,
) -> FineFp8:
    """Cast a matrix by the largest magnitude of each row, and of each column for the transpose.

    All-reduces the rows' magnitudes over ``row_axis``, the columns' over ``column_axis``.

    Args:
        x: floating, any memory order; one matrix, or many of one shape, each by itself.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        row_axis: ranks that hold other parts of the same rows.
        column_axis: ranks that hold other parts of the same columns.
        has_rows: whether to give the matrix in its own order.
    """
    x = x.detach().contiguous()
    row_tops, column_tops = _largest_of_lines(x)
    if has_rows:
        row_tops = all_reduce(row_tops, row_axis, "max")
    column_tops = all_reduce(column_tops, column_axis, "max")
    if _has_kernel(x):
        from mcore_parallel.kernels import fp8_fine_cast as kernels

        return FineFp8(*kernels.cast_lines(x, row_tops, column_tops, dtype, has_rows=has_rows))
    return _chosen(cast_lines_plain(x, row_tops, column_tops, dtype), has_rows)


def cast_lines_plain(
    x: Float[Tensor, "*E T D"],
    row_tops: Float[Tensor, "*E T"],
    column_tops: Float[Tensor, "*E D"],
    dtype: torch.dtype,
) -> FineFp8:
    """Cast by known magnitudes, in torch: the reference of the kernel."""
    rows, row_scales = scaled_by_tops(x, row_tops[..., None], dtype, is_power=False)
    columns, column_scales = scaled_by_tops(x.mT, column_tops[..., None], dtype, is_power=False)
    return FineFp8(rows, row_scales, columns, column_scales)


def cast_blocks(
    x: Float[Tensor, "T D"],
    dtype: torch.dtype,
    *,
    is_square: bool = False,
    has_rows: bool = True,
) -> FineFp8:
    """Cast a matrix and its transpose in blocks of 128; no communication.

    Args:
        x: floating, any memory order; sizes are multiples of ``BLOCK``.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        is_square: share scales in squares of 128 x 128, not along rows.
        has_rows: whether to give the matrix in its own order.
    """
    x = x.detach().contiguous()
    if _has_kernel(x):
        from mcore_parallel.kernels import fp8_fine_cast as kernels

        return FineFp8(*kernels.cast_blocks(x, dtype, is_square=is_square, has_rows=has_rows))
    return _chosen(cast_blocks_plain(x, dtype, is_square=is_square), has_rows)


def cast_blocks_plain(
    x: Float[Tensor, "T D"], dtype: torch.dtype, *, is_square: bool = False
) -> FineFp8:
    """Cast in blocks, in torch: the reference of the kernel."""
    return FineFp8(
        *_cast_in_blocks(x, dtype, is_square), *_cast_in_blocks(x.t(), dtype, is_square)
    )


def dequantized_lines(
    fp8: Shaped[Tensor, "T D"], scales: Float[Tensor, "_ _"]
) -> Float[Tensor, "T D"]:
    """Return what a cast matrix stands for, in the dtype of its scales of rows or blocks."""
    down, across = (
        -(-size // count) for size, count in zip(fp8.shape, scales.shape, strict=True)
    )
    whole = scales.repeat_interleave(down, 0).repeat_interleave(across, 1)
    return fp8.to(scales.dtype) * whole


def scaled_by_tops(
    x: Float[Tensor, "..."], tops: Float[Tensor, "..."], dtype: torch.dtype, *, is_power: bool
) -> tuple[Shaped[Tensor, "..."], Float[Tensor, "..."]]:
    """Cast numbers by known magnitudes, which become the format's largest number.

    Args:
        x: floating.
        tops: of x's dtype or wider; as many dimensions, some of size 1.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        is_power: round scales down to powers of two.

    Returns:
        The numbers, contiguous, and what multiplies them to give x back.
    """
    limit = torch.finfo(dtype).max
    wide = torch.promote_types(x.dtype, torch.float32)
    floor = tops.to(wide).clamp(min=SMALLEST_AMAX)
    # By tensors: torch divides a number, and by a number, through a rounded reciprocal.
    top = torch.full_like(floor, limit)
    scale, inverse = top / floor, floor / top
    if is_power:
        # A mantissa from 0.5 to 1 times a power: twice the least mantissa is the power below.
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
        inverse = torch.ones_like(scale) / scale
    scale, inverse = (torch.where(tops.isfinite(), s, float("nan")) for s in (scale, inverse))
    return (x.to(wide) * scale).clamp(-limit, limit).to(dtype).contiguous(), inverse


def _largest_of_lines(x: Tensor) -> tuple[Tensor, Tensor]:
    if _has_kernel(x):
        from mcore_parallel.kernels import fp8_fine_cast as kernels

        return kernels.largest_of_lines(x)
    wide = x.abs().to(torch.promote_types(x.dtype, torch.float32))
    return wide.amax(-1), wide.amax(-2)


def _cast_in_blocks(x: Tensor, dtype: torch.dtype, is_square: bool) -> tuple[Tensor, Tensor]:
    down, across = x.shape
    height = BLOCK if is_square else 1
    blocks = x.reshape(down // height, height, across // BLOCK, BLOCK)
    tops = blocks.abs().amax((1, 3), keepdim=True)
    narrow, scales = scaled_by_tops(blocks, tops, dtype, is_power=True)
    return narrow.reshape(x.shape), scales[:, 0, :, 0]


def _chosen(whole: FineFp8, has_rows: bool) -> FineFp8:
    return whole if has_rows else whole._replace(rows=whole.rows.new_empty(0, 0))


def _has_kernel(x: Tensor) -> bool:
    return (
        x.is_cuda
        and x.element_size() == 2
        and not torch.compiler.is_compiling()
        and works(FINE_CAST_KERNEL, x.device, x.dtype)
    )


def _try_casts(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Cast by the kernels and in torch, both grains and formats; a trial."""
    from mcore_parallel.kernels import fp8_fine_cast as kernels

    x = 3.0 * wave(256, 384, device=device, dtype=dtype)
    tops = x.abs().amax(1).float(), x.abs().amax(0).float()
    yield from zip(kernels.largest_of_lines(x), tops, strict=True)
    for narrow in (torch.float8_e4m3fn, torch.float8_e5m2):
        pairs = [(kernels.cast_lines(x, *tops, narrow), cast_lines_plain(x, *tops, narrow))]
        for is_square in (False, True):
            got = kernels.cast_blocks(x, narrow, is_square=is_square)
            pairs.append((got, cast_blocks_plain(x, narrow, is_square=is_square)))
        for all_got, want in pairs:
            for got, expected in zip(all_got, want, strict=True):
                yield got.float(), expected.float()


FINE_CAST_KERNEL = OptionalKernel("the fp8 casts with many scales", ("triton",), _try_casts)
"""What ``cast_lines`` and ``cast_blocks`` take where it works."""
