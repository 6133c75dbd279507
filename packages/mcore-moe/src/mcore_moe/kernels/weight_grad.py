"""Triton kernel that adds the gradients of stacked weights to their main gradients.

One launch for all experts: ``main[e] += dy[rows of e]^T x[rows of e]`` in the epilogue of the
GEMM, so that no gradient in the parameters' dtype is written and read again. With few rows an
expert the time is that of reading and writing the main gradients. The reference is
``grouped_gemm.add_weight_gradient_plain``.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor


@triton.jit
@no_type_check
def _accumulate(
    dy,
    x,
    main,
    offsets,
    n,
    k,
    OVERWRITE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # One program: a tile of one expert's weight. Neighbours share dy's columns in the cache.
    expert = tl.program_id(1)
    tiles_k = tl.cdiv(k, BLOCK_K)
    at_n = tl.program_id(0) // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    at_k = tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    begin = tl.load(offsets + expert).to(tl.int64)
    end = tl.load(offsets + expert + 1).to(tl.int64)
    is_n, is_k = at_n < n, at_k < k
    place = main + expert.to(tl.int64) * n * k + at_n[:, None].to(tl.int64) * k + at_k[None, :]
    is_here = is_n[:, None] & is_k[None, :]
    if begin == end:
        if OVERWRITE:
            tl.store(place, tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32), mask=is_here)
        return
    row = begin + tl.arange(0, BLOCK_R)
    at_dy = dy + row[:, None] * n + at_n[None, :]
    at_x = x + row[:, None] * k + at_k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for first in range(begin, end, BLOCK_R):
        left = (end - first).to(tl.int32)
        is_row = (tl.arange(0, BLOCK_R) < left)[:, None]
        a = tl.load(at_dy, mask=is_row & is_n[None, :], other=0.0)
        b = tl.load(at_x, mask=is_row & is_k[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total)
        at_dy += BLOCK_R * n
        at_x += BLOCK_R * k
    if not OVERWRITE:
        total += tl.load(place, mask=is_here, other=0.0)
    tl.store(place, total, mask=is_here)


def fused_weight_gradient(
    main: Float[Tensor, "e N K"],
    dy: Float[Tensor, "R N"],
    x: Float[Tensor, "R K"],
    offsets: Int[Tensor, " E1"],
    *,
    overwrite: bool = False,
) -> None:
    """Add the gradients of all experts' weights to ``main`` in place.

    Args:
        main: float32, contiguous.
        dy: gradient of the rows' results, bfloat16 or float16.
        x: the rows.
        offsets: int32; where each expert's rows begin, and the end of the last.
        overwrite: replace ``main``, without reading it.
    """
    experts, n, k = main.shape
    block_n, block_k, block_r = 128, 128, 64
    grid = (triton.cdiv(n, block_n) * triton.cdiv(k, block_k), experts)
    _accumulate[grid](
        dy.contiguous(),
        x.contiguous(),
        main,
        offsets,
        n,
        k,
        overwrite,
        block_n,
        block_k,
        block_r,
        num_warps=8,
        num_stages=3,
    )
