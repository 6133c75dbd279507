"""Triton kernels that decode quantized weights and round inputs.

``widened`` decodes a weight for GEMMs of many rows. ``rounded_rows`` rounds inputs to
codes for fp8 and int8 tensor cores, by each row's largest magnitude or by a calibrated scale,
and can compute a gated activation before rounding. Imported only if tensors are on a GPU.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_ckpt.mapping.low_bits import LARGEST, Code
from mcore_infer.engine.kernels.dequantization import (
    e4m3_factor,
    small_e4m3,
    wide_e2m1,
    wide_int4,
    wide_int8,
)
from mcore_infer.engine.kernels.skinny_gemm import _scale
from mcore_moe.kernels.gate import KINDS, activate

_CODES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}


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
    # One program: STEP bytes of one row of packed codes.
    row = tl.program_id(0).to(tl.int64)
    width = K // 2 if CODE == "e2m1" else K
    k = tl.program_id(1) * STEP + tl.arange(0, STEP)
    is_in = k < width
    byte = tl.load(packed + row * width + k, mask=is_in, other=0)
    dtype = out.dtype.element_ty
    column = tl.where(is_in, 2 * k if CODE == "e2m1" else k, 0)
    if CODE == "e2m1":
        scale = _scale(scales, row, column, S, TALL, WIDE)
        low = wide_e2m1(byte.to(tl.int32) & 15) * scale
        high = wide_e2m1(byte.to(tl.int32) >> 4) * scale
        tl.store(out + row * K + 2 * k, low.to(dtype), mask=is_in)
        tl.store(out + row * K + 2 * k + 1, high.to(dtype), mask=is_in)
    elif CODE == "int4":
        low, high = wide_int4(byte, tl.float32, False)
        low *= _scale(scales, 2 * row, column, S, TALL, WIDE)
        high *= _scale(scales, 2 * row + 1, column, S, TALL, WIDE)
        tl.store(out + 2 * row * K + k, low.to(dtype), mask=is_in)
        tl.store(out + (2 * row + 1) * K + k, high.to(dtype), mask=is_in)
    else:
        if CODE == "e4m3":
            wide = small_e4m3(byte, tl.float32, False) * e4m3_factor(tl.float32)
        else:
            wide = wide_int8(byte, tl.float32, False)
        wide = wide * _scale(scales, row, column, S, TALL, WIDE)
        tl.store(out + row * K + k, wide.to(dtype), mask=is_in)


@triton.jit
@no_type_check
def _round_row(
    x,
    known,
    codes,
    scales,
    D,
    LIMIT: tl.constexpr,
    IS_KNOWN: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
):
    # One program: one row, read once. It stays in registers between maximum and rounding.
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    inside = lane < D
    if KIND < 0:
        wide = tl.load(x + row * D + lane, mask=inside, other=0.0).to(tl.float32)
    else:  # a row of gates, then as many up-projections; their product is rounded to 16 bits
        gate = tl.load(x + row * 2 * D + lane, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * D + D + lane, mask=inside, other=0.0).to(tl.float32)
        active, _ = activate(gate, KIND)
        wide = (active * up).to(x.dtype.element_ty).to(tl.float32)
    if IS_KNOWN:
        scale = tl.load(known)
    else:
        top = tl.max(tl.abs(wide), 0)
        scale = tl.div_rn(tl.maximum(top, 7.888609052210118e-31), LIMIT)  # 2 ** -100
    code = tl.minimum(tl.maximum(tl.div_rn(wide, scale), -LIMIT), LIMIT)
    if not IS_FLOAT:  # round half to even: adding 1.5 * 2 ** 23 leaves no bits for fractions
        code = (code + 12582912.0) - 12582912.0
    tl.store(codes + row * D + lane, code.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def rounded_rows(
    x: Float[Tensor, "T D"],
    code: Code,
    scale: Float[Tensor, ""] | None,
    *,
    activation: str = "",
    multiple: int = 1,
) -> tuple[Shaped[Tensor, "_ F"], Float[Tensor, " _"]]:
    """Round inputs to codes in one kernel; return codes and the scale of each row.

    Args:
        x: inputs; with an activation gates, then up-projections.
        code: ``e4m3`` or ``int8``.
        scale: scale of all rows, float32; None: each row's scale, from its largest magnitude.
        activation: function of the gates, whose product with the up-projections is rounded;
            empty: round ``x`` itself.
        multiple: results are padded with undefined rows to a multiple of this number.
    """
    x, width = x.contiguous(), x.shape[1] // (2 if activation else 1)
    rows = -(-x.shape[0] // multiple) * multiple
    codes = torch.empty(rows, width, dtype=_CODES[code], device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    lanes = triton.next_power_of_2(width)
    _round_row[(x.shape[0],)](
        x,
        scales if scale is None else scale,
        codes,
        scales,
        width,
        LIMIT=LARGEST[code],
        IS_KNOWN=scale is not None,
        IS_FLOAT=code == "e4m3",
        KIND=KINDS[activation] if activation else -1,
        LANES=lanes,
        num_warps=min(32, max(4, lanes // 512)),
    )
    return codes, scales


def widened(
    packed: Shaped[Tensor, "_ _"],
    scales: Float[Tensor, "f d"],
    code: str,
    group: tuple[int, int],
    dtype: torch.dtype,
) -> Float[Tensor, "F D"]:
    """Return the decoded weight; see ``few_rows_linear`` for the arguments."""
    packed = packed.view(torch.uint8) if code in ("e4m3", "int8") else packed
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
