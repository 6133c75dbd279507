"""Weights dequantized from 4-bit codes, levels and scales: Triton kernel and reference.

A program reads bytes with two codes each, looks up the levels of both codes, multiplies the
levels by the scale of their block of 64 columns, and writes the rounded products. The reference
has the same bits.
"""

from collections.abc import Iterator
from typing import no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave

_BYTES = 1024
"""Bytes of a program."""


@triton.jit
@no_type_check
def _widen(
    codes, scales, levels, out, num_bytes, row_bytes, columns,
    IS_WHOLE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = byte < num_bytes
    code = tl.load(codes + byte, mask=inside, other=0).to(tl.int32)
    # 64 columns, so 32 bytes, share a scale.
    scale = tl.load(scales + byte // 32, mask=inside, other=0.0)
    even = tl.load(levels + (code & 15)) * scale
    odd = tl.load(levels + (code >> 4)) * scale
    pairs = tl.interleave(even, odd).to(out.dtype.element_ty)
    element = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    is_stored = element < 2 * num_bytes
    if not IS_WHOLE:  # the last block of a row is partial: skip its padding
        row = element // (2 * row_bytes)
        column = element - row * (2 * row_bytes)
        is_stored = is_stored & (column < columns)
        element = row * columns + column
    tl.store(out + element, pairs, mask=is_stored)


def _plain(
    codes: UInt8[Tensor, "F blocks 32"],
    scales: Float[Tensor, "F blocks 1"],
    levels: Float[Tensor, "16"],
    out: Float[Tensor, "F D"],
) -> None:
    byte = torch.arange(256, device=codes.device)
    pairs = torch.stack([levels[byte & 15], levels[byte >> 4]], 1)  # levels of each byte value
    shares = F.embedding(codes.int(), pairs).flatten(-2)  # [F, blocks, 32] -> [F, blocks, 64]
    out.copy_(shares.mul_(scales).flatten(1)[:, : out.shape[1]])


def _samples(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[Sample]:
    levels = wave(16, device=device, dtype=torch.float32)
    for columns in (128, 150):
        blocks = -(-columns // 64)
        codes = torch.arange(37 * blocks * 32, device=device).view(37, blocks, 32)
        scales = wave(37, blocks, 1, device=device, dtype=torch.float32)
        out = torch.empty(37, columns, device=device, dtype=dtype)
        yield Sample(codes.to(torch.uint8), scales, levels, out)


@optional_kernel(
    "widening 4-bit weights in Triton",
    reference=_plain,
    kind=lambda out: None if out.dtype == torch.float64 else (out.dtype,),
    samples=_samples,
)
def widen_levels(
    codes: UInt8[Tensor, "F blocks 32"],
    scales: Float[Tensor, "F blocks 1"],
    levels: Float[Tensor, "16"],
    out: Float[Tensor, "F D"],
) -> None:
    """Write the levels of codes times their scales to ``out``; D <= 64 * blocks.

    Args:
        codes: contiguous; the code of the even column is in the low bits.
        scales: contiguous, one for each 64 columns.
        levels: number of each code, float32.
        out: contiguous, of any dtype.
    """
    columns, row_bytes = out.shape[1], codes.shape[1] * codes.shape[2]
    num_bytes = codes.numel()
    _widen[(triton.cdiv(num_bytes, _BYTES),)](
        *(codes, scales, levels, out, num_bytes, row_bytes, columns),
        IS_WHOLE=columns == 2 * row_bytes,
        BYTES=_BYTES,
        num_warps=4,
    )
