"""Triton kernel that adds the gradients of stacked weights to their main gradients.

One launch for all experts: ``main[e] += dy[rows of e]^T x[rows of e]`` in the epilogue of the
GEMM, so that no gradient in the parameters' dtype is written and read again. With few rows an
expert the time is that of reading and writing the main gradients: so the rows of several
micro-batches may come at once, each where it lies, and are summed in registers. The reference
is ``weight_gradient.add_weight_gradient_plain``.
"""

from collections.abc import Sequence
from typing import NamedTuple, no_type_check

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from mcore_moe.experts.weight_gradient import Factors


class Tile(NamedTuple):
    """What one program computes, and how."""

    n: int = 128
    k: int = 128
    rows: int = 64
    warps: int = 8
    stages: int = 3
    gathering_stages: int = 5
    """Of which two are for the numbers of rows."""
    registers: int | None = None
    """Of a thread, at most; None: as many as the compiler likes."""


TILE = Tile()


@triton.jit
@no_type_check
def _locate(
    block,
    expert,
    dys,
    xs,
    offsets,
    dy_sources,
    x_sources,
    NUM_PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # The part that a block of an expert's rows is of, and its rows in it.
    dy, x = dys[0], xs[0]
    dy_source, x_source = dy_sources[0], x_sources[0]
    begin = tl.load(offsets[0] + expert)
    end = tl.load(offsets[0] + expert + 1)
    first = begin + block * BLOCK_R
    num_before = tl.cdiv(end - begin, BLOCK_R)
    for part in tl.static_range(1, NUM_PARTS):
        is_behind = block >= num_before
        dy = tl.where(is_behind, dys[part], dy)
        x = tl.where(is_behind, xs[part], x)
        dy_source = tl.where(is_behind, dy_sources[part], dy_source)
        x_source = tl.where(is_behind, x_sources[part], x_source)
        begin = tl.load(offsets[part] + expert)
        own_end = tl.load(offsets[part] + expert + 1)
        first = tl.where(is_behind, begin + (block - num_before) * BLOCK_R, first)
        end = tl.where(is_behind, own_end, end)
        num_before += tl.cdiv(own_end - begin, BLOCK_R)
    return dy, x, dy_source, x_source, first, end


@triton.jit
@no_type_check
def _accumulate(
    dys,
    xs,
    offsets,
    dy_sources,
    x_sources,
    main,
    n,
    k,
    NUM_PARTS: tl.constexpr,
    GATHERS_DY: tl.constexpr,
    GATHERS_X: tl.constexpr,
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
    is_n, is_k = at_n < n, at_k < k
    place = main + expert.to(tl.int64) * n * k + (at_n[:, None] * k + at_k[None, :])
    is_here = is_n[:, None] & is_k[None, :]
    num_blocks = 0
    for part in tl.static_range(NUM_PARTS):
        ends = offsets[part] + expert
        num_blocks += tl.cdiv(tl.load(ends + 1) - tl.load(ends), BLOCK_R)
    if num_blocks == 0:
        if OVERWRITE:
            tl.store(place, tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32), mask=is_here)
        return
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    # One loop over the blocks of all parts, whose loads run ahead across their borders.
    for block in range(num_blocks):
        dy, x, dy_source, x_source, first, end = _locate(
            block, expert, dys, xs, offsets, dy_sources, x_sources, NUM_PARTS, BLOCK_R
        )
        row = first + tl.arange(0, BLOCK_R)
        is_row = row < end
        row_dy, row_x = row, row
        if GATHERS_DY:
            row_dy = tl.load(dy_source + row, mask=is_row, other=0)
        if GATHERS_X:
            row_x = tl.load(x_source + row, mask=is_row, other=0)
        at_dy = dy + row_dy[:, None].to(tl.int64) * n + at_n[None, :]
        at_x = x + row_x[:, None].to(tl.int64) * k + at_k[None, :]
        a = tl.load(at_dy, mask=is_row[:, None] & is_n[None, :], other=0.0)
        b = tl.load(at_x, mask=is_row[:, None] & is_k[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total)
    if not OVERWRITE:
        total += tl.load(place, mask=is_here, other=0.0)
    tl.store(place, total, mask=is_here)


def fused_weight_gradient(
    main: Float[Tensor, "e N K"],
    parts: Sequence[Factors],
    *,
    overwrite: bool = False,
    tile: Tile = TILE,
) -> None:
    """Add the gradients of all experts' weights to ``main`` in place.

    Args:
        main: float32, contiguous.
        parts: factors in bfloat16 or float16, which gather alike; a kernel is compiled for
            each number of them.
        overwrite: replace ``main``, without reading it.
        tile: of a program.
    """
    gathers = parts[0].grad_sources is not None, parts[0].x_sources is not None
    experts, n, k = main.shape
    grid = (triton.cdiv(n, tile.n) * triton.cdiv(k, tile.k), experts)
    _accumulate[grid](
        tuple(part.grad.contiguous() for part in parts),
        tuple(part.x.contiguous() for part in parts),
        tuple(part.offsets for part in parts),
        # Where nothing is gathered the kernel takes any address and reads none.
        tuple(
            part.offsets if part.grad_sources is None else part.grad_sources for part in parts
        ),
        tuple(part.offsets if part.x_sources is None else part.x_sources for part in parts),
        main,
        n,
        k,
        len(parts),
        *gathers,
        overwrite,
        tile.n,
        tile.k,
        tile.rows,
        num_warps=tile.warps,
        num_stages=tile.gathering_stages if any(gathers) else tile.stages,
        maxnreg=tile.registers,
    )
