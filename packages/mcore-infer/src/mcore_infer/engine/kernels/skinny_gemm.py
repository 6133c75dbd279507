"""Triton GEMM with few rows, limited by reading the weight once.

In decoding a GEMM has one row for each request, and takes the time of reading the weight: in 16
bits, or as 8-bit and 4-bit codes that are decoded in registers. Each program multiplies some
rows of the weight with all rows of the input, so that outputs fill the taller side of the
tensor cores' tiles. If programs are few, several of them share a row of the weight (splits);
the last program to finish adds the sums of all splits, always in the same order. Imported only
if tensors are on a GPU.
"""

from collections.abc import Iterator
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from mcore_ckpt.formats.quantized_layouts import LAYOUTS, QuantLayout
from mcore_infer.engine.kernels.dequantization import (
    e4m3_factor,
    small_e4m3,
    small_e4m3_words,
    wide_e2m1,
    wide_int4,
    wide_int8,
)
from mcore_infer.engine.kernels.skinny_gemm_tiles import NUM_COUNTERS, Tile, tiles_for
from mcore_parallel.optional_kernels import OptionalKernel, wave


@triton.jit
@no_type_check
def _scale(scales, row, column, S, TALL: tl.constexpr, WIDE: tl.constexpr):
    # Scales of outputs ``row`` and inputs ``column``, which broadcast. A group has TALL outputs
    # and WIDE inputs; 0: all of them. S: scales of one row of groups.
    place = column * 0 + row * 0
    if TALL > 0:
        place += row // TALL * S
    if WIDE > 0:
        place += column // WIDE
    return tl.load(scales + place)


@triton.jit
@no_type_check
def _widened(byte, dtype: tl.constexpr, CODE: tl.constexpr, IS_PACKED: tl.constexpr):
    if CODE == "e4m3":
        wide = small_e4m3(byte, dtype, IS_PACKED)
    elif CODE == "int8":
        wide = wide_int8(byte, dtype, IS_PACKED)
    else:
        wide = byte
    return wide


@triton.jit
@no_type_check
def _dot_e2m1(
    byte,
    row,
    column,
    even,
    odd,
    scales,
    S,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Product with even inputs plus product with odd inputs. Both codes of a byte are in one
    # group, so they have the same scale.
    scale = _scale(scales, row, column, S, TALL, WIDE)
    low = (wide_e2m1(byte.to(tl.int32) & 15) * scale).to(even.dtype)
    high = (wide_e2m1(byte.to(tl.int32) >> 4) * scale).to(even.dtype)
    total = tl.dot(low, tl.trans(even), input_precision=PRECISION)
    return tl.dot(high, tl.trans(odd), total, input_precision=PRECISION)


@triton.jit
@no_type_check
def _sums(
    x, weight, scales, row, begin, end, M, D, W, S,
    CODE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    OUTS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    IS_PACKED: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    # Sums over the elements ``begin`` to ``end`` of OUTS rows of the weight's memory. A row of
    # int4 codes has two outputs, whose sums are returned separately. Scales of whole rows are
    # applied by the caller.
    m, k = tl.arange(0, ROWS), tl.arange(0, STEP)
    is_row = (m < M)[:, None]
    apart: tl.constexpr = 2 if CODE == "e2m1" else 1
    places = weight + row[:, None].to(tl.int64) * W + k[None, :]
    if IS_EVEN and CODE == "e4m3":  # load four codes as one integer
        words = weight.to(tl.pointer_type(tl.int32), bitcast=True)
        words += row[:, None].to(tl.int64) * (W // 4) + tl.arange(0, STEP // 4)[None, :]
    inputs = x + m[:, None] * D + apart * k[None, :]
    first = tl.zeros([OUTS, ROWS], tl.float32)
    second = tl.zeros([OUTS, ROWS], tl.float32)
    for start in tl.range(begin, end, STEP, num_stages=STAGES):
        is_in = (start + k < W)[None, :]
        if IS_EVEN and CODE == "e4m3":
            part = tl.load(words + start // 4)
            given = tl.load(inputs + start, mask=is_row, other=0.0)
        elif IS_EVEN:
            part = tl.load(places + start)
            given = tl.load(inputs + apart * start, mask=is_row, other=0.0)
        else:
            part = tl.load(places + start, mask=is_in, other=0)
            given = tl.load(inputs + apart * start, mask=is_row & is_in, other=0.0)
        if CODE == "e2m1":
            odd = tl.load(inputs + 2 * start + 1, mask=is_row & is_in, other=0.0)
            # Input of each code; 0 after the end, to load a valid scale.
            at = tl.where(is_in, 2 * (start + k)[None, :], 0)
            first += _dot_e2m1(
                part, row[:, None], at, given, odd, scales, S, TALL, WIDE, PRECISION
            )
        elif CODE == "int4":  # STEP divides a group of inputs: one scale for each output
            low, high = wide_int4(part, given.dtype, IS_PACKED)
            one = _scale(scales, 2 * row, start, S, TALL, WIDE)[:, None]
            two = _scale(scales, 2 * row + 1, start, S, TALL, WIDE)[:, None]
            first += tl.dot(low, tl.trans(given), input_precision=PRECISION) * one
            second += tl.dot(high, tl.trans(given), input_precision=PRECISION) * two
        else:
            if IS_EVEN and CODE == "e4m3":
                wide = small_e4m3_words(part, given.dtype, IS_PACKED)
            else:
                wide = _widened(part, given.dtype, CODE, IS_PACKED)
            if WIDE > 0:
                one = _scale(scales, row, start, S, TALL, WIDE)[:, None]
                first += tl.dot(wide, tl.trans(given), input_precision=PRECISION) * one
            else:
                first = tl.dot(wide, tl.trans(given), first, input_precision=PRECISION)
    return first, second


@triton.jit(do_not_specialize=["M"])
@no_type_check
def _few_rows(
    x, weight, scales, out, parts, counters, M, N, D, W, S,
    CODE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    OUTS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, IS_PACKED: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    # One program: OUTS of the N rows of the weight's memory, and one split of their elements.
    program, split = tl.program_id(0), tl.program_id(1)
    n = program * OUTS + tl.arange(0, OUTS)
    row = tl.where(n < N, n, 0)
    size = tl.cdiv(W, SPLITS * STEP) * STEP
    begin = split * size
    end = tl.minimum(W, begin + size)
    first, second = _sums(
        x, weight, scales, row, begin, end, M, D, W, S,
        CODE, TALL, WIDE, ROWS, OUTS, STEP, STAGES, PRECISION, IS_PACKED, IS_EVEN,
    )  # fmt: skip
    if CODE == "e4m3":
        first = first * e4m3_factor(x.dtype.element_ty)
    if CODE != "" and WIDE == 0:  # int4 and e2m1 have groups
        first = first * _scale(scales, row, 0, S, TALL, WIDE)[:, None]
    outputs: tl.constexpr = 2 * OUTS if CODE == "int4" else OUTS
    width = 2 * N if CODE == "int4" else N
    if CODE == "int4":  # interleave even and odd outputs
        both = tl.permute(tl.join(first, second), 0, 2, 1)
        first = tl.reshape(both, [outputs, ROWS])
    output = program * outputs + tl.arange(0, outputs)
    m = tl.arange(0, ROWS)
    place = m[None, :] * width + output[:, None]
    mask = (m < M)[None, :] & (output < width)[:, None]
    dtype = out.dtype.element_ty
    if SPLITS == 1:
        tl.store(out + place, first.to(dtype), mask=mask)
    else:
        # The counter of this program's outputs finds the last split, which adds all parts and
        # resets the counter. The barrier orders the stores before the atomic of one thread.
        tl.store(parts + split * (M * width) + place, first, mask=mask)
        tl.debug_barrier()
        if tl.atomic_add(counters + program, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros([outputs, ROWS], tl.float32)
            for one in tl.static_range(SPLITS):
                at = parts + one * (M * width) + place
                total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out + place, total.to(dtype), mask=mask)
            tl.store(counters + program, 0)


def few_rows_linear(
    x: Float[Tensor, "*B D"],
    weight: Shaped[Tensor, "_ _"],
    scales: Float[Tensor, "f d"] | None = None,
    *,
    code: str = "",
    group: tuple[int, int] = (0, 0),
    tile: Tile | None = None,
    counters: Int32[Tensor, " C"] | None = None,
) -> Float[Tensor, "*B F"]:
    """Multiply at most ``MOST_ROWS`` rows with a weight's transpose; sums in float32.

    The launch depends on shapes alone, so a CUDA graph can record it.

    Args:
        x: inputs in bfloat16, float16 or float32.
        weight: weight in the dtype of ``x``, or codes of ``mcore_ckpt.mapping.low_bits.pack``.
        scales: scales of codes, float32, one for each group; None: the weight has no scales.
        code: format of the codes; empty: the weight has the dtype of ``x``.
        group: numbers of outputs and of inputs that share a scale; 0: all.
        tile: sizes of a program; None: the first of ``tiles_for``.
        counters: ``NUM_COUNTERS`` zeros for tiles with splits; reset to zero. Concurrent calls
            must not share them. None: allocated here.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    num_rows, D = rows.shape
    weight = weight.view(torch.uint8) if code in ("e4m3", "int8") else weight
    N, W = weight.shape
    F = N * (2 if code == "int4" else 1)
    tile = tile or tiles_for(num_rows, code, (N, W), x.element_size())[0]
    outs, step, stages, warps, splits = tile
    if code and code != "e2m1" and group[1]:  # one step must not span two groups of inputs
        step = min(step, group[1])
    out = torch.empty(num_rows, F, dtype=x.dtype, device=x.device)
    parts = out
    if splits > 1:
        assert triton.cdiv(N, outs) <= NUM_COUNTERS
        parts = torch.empty(splits * num_rows * F, dtype=torch.float32, device=x.device)
        if counters is None:
            counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=x.device)
    _few_rows[(triton.cdiv(N, outs), splits)](
        rows,
        weight,
        rows if scales is None else scales,
        out,
        parts,
        out if counters is None else counters,
        num_rows,
        N,
        D,
        W,
        0 if scales is None else scales.shape[1],
        CODE=code,
        TALL=group[0],
        WIDE=group[1],
        ROWS=max(8, triton.next_power_of_2(num_rows)),
        OUTS=outs,
        STEP=step,
        STAGES=stages,
        SPLITS=splits,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        IS_PACKED=x.dtype == torch.bfloat16,
        IS_EVEN=W % step == 0,
        num_warps=warps,  # pyrefly: ignore
    )
    return out.view(*x.shape[:-1], F)


def _trial(
    device: torch.device, dtype: torch.dtype, code: str = "", group: tuple[int, int] = (0, 0)
) -> Iterator[tuple[Tensor, Tensor]]:
    """Multiply few rows of odd and even sizes, with and without splits."""
    for num_rows, features, channels in ((1, 40, 320), (3, 160, 1024), (33, 96, 768)):
        x = wave(num_rows, channels, device=device, dtype=dtype)
        weight = wave(features, channels, device=device, dtype=torch.float32)
        weight = (weight * wave(features, 1, device=device, dtype=torch.float32).exp()).to(
            dtype
        )
        stored, scales, wide = weight, None, weight
        if code:
            if group[1] and channels % group[1]:
                continue
            stored, scales, wide = in_codes(weight, code, group)
        for splits in (1, 2):
            shape = (stored.shape[0], stored.shape[1])
            tile = tiles_for(num_rows, code, shape, x.element_size())[0]
            tile = tile._replace(splits=splits)
            yield (
                few_rows_linear(x, stored, scales, code=code, group=group, tile=tile),
                x.double() @ wide.double().t(),
            )


def in_codes(
    weight: Tensor, code: str, group: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a weight; return its codes, their scales, and the decoded numbers."""
    layout = next(layout for layout in LAYOUTS.values() if layout.code == code)
    layout = QuantLayout(algo="", code=layout.code, group=group)
    scales = layout.scales(weight)
    packed = layout.packed(layout.quantized(weight, scales))
    return packed, layout.wide_scales(scales), layout.dequantized(packed, scales)


FEW_ROWS_KERNEL = OptionalKernel("the GEMM of few rows", ("triton",), _trial)
"""The kind is the dtype; for codes also their format and the sizes of a group."""
