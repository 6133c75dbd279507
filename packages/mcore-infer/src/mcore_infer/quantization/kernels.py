"""Triton kernels for weights of eight and four bits.

``few_rows_matmul`` multiplies the few rows of a decoding step: it reads a weight's codes once,
widens them in registers and multiplies on tensor cores, so it takes the time of reading the
codes. ``widened`` writes a whole weight in 16 bits, for GEMMs of many rows. Imported only where
tensors are on a GPU.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

Tiles = tuple[int, int, int, int]
"""Rows of bytes, bytes of a row, stages and warps of a program."""
MOST_ROWS = 64
"""Rows of an input that ``few_rows_matmul`` takes."""


@triton.jit
@no_type_check
def _scale(scales, row, column, S, TALL: tl.constexpr, WIDE: tl.constexpr):
    # Of outputs ``row`` and inputs ``column``, which broadcast; 0: one for all of them.
    place = column * 0 + row * 0
    if TALL > 0:
        place += row // TALL * S
    if WIDE > 0:
        place += column // WIDE
    return tl.load(scales + place)


@triton.jit
@no_type_check
def _low_e2m1(code):
    # A sign, two bits of exponent, one of fraction, as a number times 4.
    fraction, exponent = code & 1, (code >> 1) & 3
    size = tl.where(exponent == 0, 2 * fraction, (2 + fraction) << exponent)
    return tl.where((code & 8) > 0, -size, size).to(tl.float32) * 0.25


@triton.jit
@no_type_check
def _small_e4m3(byte, dtype: tl.constexpr):
    # Times 2 ** -120: sign, exponent and fraction stand in wider floats in the same order, and
    # exponents count from 7 here and from 127 there. Three integer operations, where casts of
    # fp8 have a sixteenth of their throughput.
    if dtype == tl.bfloat16:
        wide = byte.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 4)
        small = bits.to(tl.bfloat16, bitcast=True)
    else:
        wide = byte.to(tl.int32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        small = bits.to(tl.float32, bitcast=True).to(dtype)
    return small


@triton.jit
@no_type_check
def _int4(nibble, dtype: tl.constexpr):
    # As the last bits of 128 to 143 in bfloat16, of which what was put on is taken off.
    bits = (nibble ^ 8) | 0x4300
    return bits.to(tl.bfloat16, bitcast=True).to(dtype) - 136.0


@triton.jit
@no_type_check
def _times_int4(
    given,
    byte,
    row,
    start,
    scales,
    S,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Of the even outputs and of the odd ones; a step lies within one group of inputs.
    low = tl.trans(_int4(byte.to(tl.int16) & 15, given.dtype))
    high = tl.trans(_int4(byte.to(tl.int16) >> 4, given.dtype))
    one = _scale(scales, 2 * row, start, S, TALL, WIDE)[None, :]
    two = _scale(scales, 2 * row + 1, start, S, TALL, WIDE)[None, :]
    first = tl.dot(given, low, input_precision=PRECISION) * one
    return first, tl.dot(given, high, input_precision=PRECISION) * two


@triton.jit
@no_type_check
def _times_e2m1(
    given,
    odd,
    byte,
    row,
    column,
    scales,
    S,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Of even inputs plus that of odd ones; both of a byte lie in one group.
    scale = _scale(scales, row[:, None], column, S, TALL, WIDE)
    low = (_low_e2m1(byte.to(tl.int32) & 15) * scale).to(given.dtype)
    high = (_low_e2m1(byte.to(tl.int32) >> 4) * scale).to(given.dtype)
    total = tl.dot(given, tl.trans(low), input_precision=PRECISION)
    return tl.dot(odd, tl.trans(high), total, input_precision=PRECISION)


@triton.jit
@no_type_check
def _few_rows(
    x,
    packed,
    scales,
    out,
    num_rows,
    N,
    K,
    S,
    CODE: tl.constexpr,
    IS_SCALED_LAST: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program: OUTS rows of bytes (of four-bit integers two outputs each), all inputs.
    m, n = tl.arange(0, ROWS), tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    is_row = (m < num_rows)[:, None]
    width = K // 2 if CODE == "e2m1" else K
    is_out = n < (N // 2 if CODE == "int4" else N)
    row = tl.where(is_out, n, 0)
    k = tl.arange(0, STEP)
    first = tl.zeros([ROWS, OUTS], tl.float32)
    second = tl.zeros([ROWS, OUTS], tl.float32)
    places = packed + row[:, None].to(tl.int64) * width + k[None, :]
    stride = 2 if CODE == "e2m1" else 1
    inputs = x + m[:, None] * K + stride * k[None, :]
    for start in tl.range(0, width, STEP, num_stages=STAGES):
        is_in = (start + k < width)[None, :]
        byte = tl.load(places + start, mask=is_out[:, None] & is_in, other=0)
        given = tl.load(inputs + stride * start, mask=is_row & is_in, other=0.0)
        if CODE == "e2m1":
            odd = tl.load(inputs + 2 * start + 1, mask=is_row & is_in, other=0.0)
            at = tl.where(is_in, 2 * (start + k)[None, :], 0)
            first += _times_e2m1(given, odd, byte, row, at, scales, S, TALL, WIDE, PRECISION)
        elif CODE == "int4":
            one, two = _times_int4(given, byte, row, start, scales, S, TALL, WIDE, PRECISION)
            first, second = first + one, second + two
        else:
            wide = _small_e4m3(byte, given.dtype) if CODE == "e4m3" else byte.to(given.dtype)
            if IS_SCALED_LAST:
                first = tl.dot(given, tl.trans(wide), first, input_precision=PRECISION)
            else:
                one = tl.dot(given, tl.trans(wide), input_precision=PRECISION)
                first += one * _scale(scales, row, start, S, TALL, WIDE)[None, :]
    if CODE == "e4m3":
        first = first * 1.329227995784916e36  # 2 ** 120
    if IS_SCALED_LAST:
        first = first * _scale(scales, row, 0, S, TALL, WIDE)[None, :]
    mask = is_row & is_out[None, :]
    dtype = out.dtype.element_ty
    apart = 2 if CODE == "int4" else 1
    places = out + m[:, None] * N + apart * n[None, :]
    tl.store(places, first.to(dtype), mask=mask)
    if CODE == "int4":
        tl.store(places + 1, second.to(dtype), mask=mask)


@triton.jit
@no_type_check
def _widen(
    packed,
    scales,
    out,
    K,
    S,
    CODE: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    # One program: STEP bytes of one row of bytes.
    row = tl.program_id(0).to(tl.int64)
    width = K // 2 if CODE == "e2m1" else K
    k = tl.program_id(1) * STEP + tl.arange(0, STEP)
    is_in = k < width
    byte = tl.load(packed + row * width + k, mask=is_in, other=0)
    dtype = out.dtype.element_ty
    column = tl.where(is_in, 2 * k if CODE == "e2m1" else k, 0)
    if CODE == "e2m1":
        scale = _scale(scales, row, column, S, TALL, WIDE)
        low = _low_e2m1(byte.to(tl.int32) & 15) * scale
        high = _low_e2m1(byte.to(tl.int32) >> 4) * scale
        tl.store(out + row * K + 2 * k, low.to(dtype), mask=is_in)
        tl.store(out + row * K + 2 * k + 1, high.to(dtype), mask=is_in)
    elif CODE == "int4":
        low = _int4(byte.to(tl.int16) & 15, tl.float32)
        high = _int4(byte.to(tl.int16) >> 4, tl.float32)
        low *= _scale(scales, 2 * row, column, S, TALL, WIDE)
        high *= _scale(scales, 2 * row + 1, column, S, TALL, WIDE)
        tl.store(out + 2 * row * K + k, low.to(dtype), mask=is_in)
        tl.store(out + (2 * row + 1) * K + k, high.to(dtype), mask=is_in)
    else:
        wide = byte.to(tl.float32)
        if CODE == "e4m3":
            wide = _small_e4m3(byte, tl.float32) * 1.329227995784916e36
        wide = wide * _scale(scales, row, column, S, TALL, WIDE)
        tl.store(out + row * K + k, wide.to(dtype), mask=is_in)


def few_rows_matmul(
    x: Float[Tensor, "T D"],
    packed: Shaped[Tensor, "_ _"],
    scales: Float[Tensor, "f d"],
    code: str,
    group: tuple[int, int],
    tiles: Tiles | None = None,
) -> Float[Tensor, "T F"]:
    """Multiply few rows with a packed weight's transpose.

    Takes shapes alone, so a CUDA graph may hold it.

    Args:
        x: at most ``MOST_ROWS`` rows.
        packed: see ``mcore_ckpt.mapping.low_bits.pack``.
        scales: float32, one for each group.
        code: format of the weight's numbers.
        group: outputs and inputs that share a scale; 0: all.
        tiles: rows of bytes and bytes of a row that a program takes at once, stages, warps;
            None: the first of ``tiles_for``.
    """
    num_rows, K = x.shape
    packed = packed.view(torch.uint8) if code == "e4m3" else packed
    N = packed.shape[0] * (2 if code == "int4" else 1)
    out = torch.empty(num_rows, N, dtype=x.dtype, device=x.device)
    rows = max(16, triton.next_power_of_2(num_rows))
    outs, step, stages, warps = tiles or tiles_for(num_rows, code)[0]
    if group[1] and code != "e2m1":
        step = min(step, group[1])
    _few_rows[(triton.cdiv(packed.shape[0], outs),)](
        x.contiguous(),
        packed,
        scales,
        out,
        num_rows,
        N,
        K,
        scales.shape[1],
        CODE=code,
        IS_SCALED_LAST=code in ("e4m3", "int8") and not group[1],
        TALL=group[0],
        WIDE=group[1],
        ROWS=rows,
        OUTS=outs,
        STEP=step,
        STAGES=stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps,
    )
    return out


def tiles_for(num_rows: int, code: str) -> list[Tiles]:
    """List tiles that are fast somewhere, the safest first."""
    if code in ("int4", "e2m1"):
        return [(32, 128, 4, 4), (32, 128, 6, 2), (16, 128, 6, 2), (64, 128, 4, 4)]
    if num_rows <= 16:
        return [(32, 256, 4, 4), (32, 512, 2, 2), (32, 512, 4, 2), (16, 512, 4, 2)]
    return [(32, 256, 3, 4), (16, 256, 4, 2), (32, 128, 4, 4), (64, 128, 3, 4)]


def widened(
    packed: Shaped[Tensor, "_ _"],
    scales: Float[Tensor, "f d"],
    code: str,
    group: tuple[int, int],
    dtype: torch.dtype,
) -> Float[Tensor, "F D"]:
    """Return what a packed weight stands for; see ``few_rows_matmul`` for the arguments."""
    packed = packed.view(torch.uint8) if code == "e4m3" else packed
    N = packed.shape[0] * (2 if code == "int4" else 1)
    K = packed.shape[1] * (2 if code == "e2m1" else 1)
    out = torch.empty(N, K, dtype=dtype, device=packed.device)
    step = 1024
    grid = (packed.shape[0], triton.cdiv(packed.shape[1], step))
    tall, wide = group
    _widen[grid](
        packed, scales, out, K, scales.shape[1], CODE=code, TALL=tall, WIDE=wide, STEP=step
    )
    return out
