"""What kernels of the state-space form share, forward and backward: one chunk of one head.

See ``kernels.ssd``.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def decays(
    dt, A, docs, head, row, chunk, length, batch, heads,
    CHUNK: tl.constexpr, HAS_DOCS: tl.constexpr,
):  # fmt: skip
    """Steps, running decay, its total, and the factors from before and to the end."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < length
    step = tl.load(dt + (token * batch + row) * heads + head, mask=inside, other=0.0)
    decay = step * tl.load(A + head)
    sums = tl.cumsum(decay, 0)
    last = tl.sum(decay, 0)
    over = tl.exp(last)
    from_before = tl.exp(sums)
    to_end = tl.exp(last - sums)
    mine = tl.zeros([CHUNK], tl.int32)
    if HAS_DOCS:
        mine = tl.load(docs + token * batch + row, mask=inside, other=-1)
        end = tl.load(docs + (tl.minimum(chunk * CHUNK + CHUNK, length) - 1) * batch + row)
        previous = tl.load(docs + tl.maximum(chunk * CHUNK - 1, 0) * batch + row)
        previous = tl.where(chunk > 0, previous, 0)
        over = tl.where(end == previous, over, 0.0)
        from_before = tl.where(mine == previous, from_before, 0.0)
        to_end = tl.where(mine == end, to_end, 0.0)
    return step, sums, over, from_before, to_end, mine


@triton.jit
@no_type_check
def inside_chunk(sums, mine, CHUNK: tl.constexpr, HAS_DOCS: tl.constexpr):
    """Decay from every token of a chunk (columns) to every later one (rows), else 0."""
    place = tl.arange(0, CHUNK)
    sees = place[:, None] >= place[None, :]
    if HAS_DOCS:
        sees = sees & (mine[:, None] == mine[None, :])
    # Masked before exp: the sum above the diagonal grows without bound.
    return tl.exp(tl.where(sees, sums[:, None] - sums[None, :], -float("inf")))


@triton.jit
@no_type_check
def of_group(tensor, token_stride, row_stride, token, row, group, length, K: tl.constexpr):
    """Load B or C of a chunk."""
    at = row * row_stride + group * K + tl.arange(0, K)[None, :]
    rows = (token < length)[:, None]
    return tl.load(tensor + token[:, None] * token_stride + at, mask=rows, other=0.0)
