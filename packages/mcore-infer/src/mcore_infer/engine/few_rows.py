"""Triton GEMM of a few rows: a matrix read once, as fast as memory gives it.

While text is written a GEMM has one row a request, and its time is that of reading the
weight. Each program multiplies all rows with some rows of the weight. Imported only where
tensors are on a GPU.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from mcore_infer.engine.decoding import MOST_ROWS
from mcore_parallel.optional_kernels import OptionalKernel, wave


@triton.jit
@no_type_check
def _multiply(
    x,
    weight,
    out,
    M,
    F,
    D,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    at_x = x + row[:, None] * D + channel[None, :]
    at_weight = weight + feature[:, None].to(tl.int64) * D + channel[None, :]
    is_row, is_feature = row[:, None] < M, feature[:, None] < F
    total = tl.zeros([ROWS, FEATURES], tl.float32)
    for begin in tl.range(0, D, CHANNELS, num_stages=STAGES):
        is_channel = (begin + channel)[None, :] < D
        part = tl.load(at_weight + begin, mask=is_feature & is_channel, other=0.0)
        rows = tl.load(at_x + begin, mask=is_row & is_channel, other=0.0)
        total = tl.dot(rows, tl.trans(part), total)
    place = out + row[:, None] * F + feature[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row & (feature[None, :] < F))


def tile_of(num_features: int, num_channels: int) -> tuple[int, int, int, int]:
    """Choose features and channels of a tile, stages, warps; by measurement on an H200."""
    if num_features >= 8192:
        return 32, 512, 2, 2
    return (32 if num_channels >= 4096 else 16), 512, 4, 2


def few_rows_linear(
    x: Float[Tensor, "*B D"],
    weight: Float[Tensor, "F D"],
    tile: tuple[int, int, int, int] | None = None,
) -> Float[Tensor, "*B F"]:
    """Multiply at most ``MOST_ROWS`` rows with a weight, ``x W^T``; sums in float32.

    Args:
        x: bfloat16 or float16.
        weight: of the same dtype.
        tile: features, channels, stages, warps; None: ``tile_of``.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    (M, D), F = rows.shape, weight.shape[0]
    out = torch.empty(M, F, dtype=x.dtype, device=x.device)
    features, channels, stages, warps = tile or tile_of(F, D)
    _multiply[(triton.cdiv(F, features),)](
        rows,
        weight,
        out,
        M,
        F,
        D,
        ROWS=MOST_ROWS,
        FEATURES=features,
        CHANNELS=channels,
        STAGES=stages,
        num_warps=warps,  # pyrefly: ignore
    )
    return out.view(*x.shape[:-1], F)


def _trial(device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    pairs = []
    for rows, features, channels in ((1, 24, 320), (3, 40, 8200), (16, 8208, 72)):
        x = wave(rows, channels, device=device, dtype=dtype)
        weight = wave(features, channels, device=device, dtype=dtype)
        pairs.append((few_rows_linear(x, weight), x @ weight.t()))
    return pairs


FEW_ROWS_KERNEL = OptionalKernel("the GEMM of a few rows", ("triton",), _trial)
"""Kind: dtype."""
