"""Triton kernels that decode quantized weights and round inputs.

``widened`` decodes a weight for GEMMs of many rows. ``rounded_rows`` rounds inputs to
codes for fp8 and int8 tensor cores, by each row's largest magnitude or by a calibrated scale.
Imported only if tensors are on a GPU.
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
    LANES: tl.constexpr,
):
    # One program: one row, read twice: for its largest magnitude, then (from the cache) to
    # round.
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    if IS_KNOWN:
        scale = tl.load(known)
    else:
        top = tl.zeros([LANES], tl.float32)
        for start in range(0, D, LANES):
            part = tl.load(x + row * D + start + lane, mask=start + lane < D, other=0.0)
            top = tl.maximum(top, tl.abs(part.to(tl.float32)))
        scale = tl.div_rn(tl.maximum(tl.max(top, 0), 7.888609052210118e-31), LIMIT)  # 2 ** -100
    for start in range(0, D, LANES):
        inside = start + lane < D
        part = tl.load(x + row * D + start + lane, mask=inside, other=0.0).to(tl.float32)
        code = tl.minimum(tl.maximum(tl.div_rn(part, scale), -LIMIT), LIMIT)
        if IS_FLOAT:
            code = code.to(tl.float8e4nv)
        else:  # ties to even: adding 1.5 * 2 ** 23 leaves no bits for fractions
            code = ((code + 12582912.0) - 12582912.0).to(tl.int8)
        tl.store(codes + row * D + start + lane, code, mask=inside)
    tl.store(scales + row, scale)


def rounded_rows(
    x: Float[Tensor, "T D"], code: Code, scale: Float[Tensor, ""] | None
) -> tuple[Shaped[Tensor, "T D"], Float[Tensor, " T"]]:
    """Round inputs to codes in one kernel; return codes and the scale of each row.

    Args:
        x: inputs.
        code: ``e4m3`` or ``int8``.
        scale: of all rows, float32; None: of each row, from its largest magnitude.
    """
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=_CODES[code], device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _round_row[(x.shape[0],)](
        x,
        scales if scale is None else scale,
        codes,
        scales,
        x.shape[1],
        LIMIT=LARGEST[code],
        IS_KNOWN=scale is not None,
        IS_FLOAT=code == "e4m3",
        LANES=min(4096, triton.next_power_of_2(x.shape[1])),
        num_warps=8,
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
