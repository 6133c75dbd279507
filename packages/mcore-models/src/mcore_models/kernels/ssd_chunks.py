"""What chunked kernels of recurrences share, forward and backward: one chunk of one head.

See ``kernels.ssd`` and ``kernels.delta``.
"""

from typing import no_type_check

from mcore_parallel.optional_kernels import tl, triton


@triton.jit
@no_type_check
def decays(
    dt, A, docs, head, row, chunk, length, batch, heads,
    CHUNK: tl.constexpr, HAS_DOCS: tl.constexpr,
):  # fmt: skip
    """Return steps, running decay, its total, and the factors from before and to the end."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    step = tl.load(dt + (token * batch + row) * heads + head, mask=token < length, other=0.0)
    sums, over, from_before, to_end, mine = running(
        step * tl.load(A + head), docs, row, chunk, length, batch, CHUNK, HAS_DOCS
    )
    return step, sums, over, from_before, to_end, mine


@triton.jit
@no_type_check
def running(
    decay, docs, row, chunk, length, batch, CHUNK: tl.constexpr, HAS_DOCS: tl.constexpr
):  # fmt: skip
    """Return a chunk's running decay, its total, and the factors from before and to the end."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    sums = tl.cumsum(decay, 0)
    last = tl.sum(decay, 0)
    over = tl.exp(last)
    from_before = tl.exp(sums)
    to_end = tl.exp(last - sums)
    mine = tl.zeros([CHUNK], tl.int32)
    if HAS_DOCS:
        # A state crosses the begin or the end of a chunk only within one document. Before the
        # first chunk is document 0, to which the initial state belongs.
        mine = tl.load(docs + token * batch + row, mask=token < length, other=-1)
        end = tl.load(docs + (tl.minimum(chunk * CHUNK + CHUNK, length) - 1) * batch + row)
        previous = tl.load(docs + tl.maximum(chunk * CHUNK - 1, 0) * batch + row)
        previous = tl.where(chunk > 0, previous, 0)
        over = tl.where(end == previous, over, 0.0)
        from_before = tl.where(mine == previous, from_before, 0.0)
        to_end = tl.where(mine == end, to_end, 0.0)
    return sums, over, from_before, to_end, mine


@triton.jit
@no_type_check
def running_of(
    g, docs, head, row, chunk, length, batch, heads,
    CHUNK: tl.constexpr, HAS_DOCS: tl.constexpr,
):  # fmt: skip
    """Return ``running`` for a head's logarithms of decays."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    decay = tl.load(g + (token * batch + row) * heads + head, mask=token < length, other=0.0)
    return running(decay, docs, row, chunk, length, batch, CHUNK, HAS_DOCS)


@triton.jit
@no_type_check
def inside_chunk(sums, mine, CHUNK: tl.constexpr, HAS_DOCS: tl.constexpr):
    """Return the decay from every token (column) to every later token (row), else 0."""
    place = tl.arange(0, CHUNK)
    sees = place[:, None] >= place[None, :]
    if HAS_DOCS:
        sees = sees & (mine[:, None] == mine[None, :])
    # Masked before exp: the sum above the diagonal is unbounded.
    return tl.exp(tl.where(sees, sums[:, None] - sums[None, :], -float("inf")))


@triton.jit
@no_type_check
def of_group(
    tensor, token_stride, row_stride, token, row, group, length,
    K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Load the first of K numbers of a group of heads for each token of a chunk."""
    at = row * row_stride + group * K + tl.arange(0, WIDTH)[None, :]
    rows = (token < length)[:, None]
    return tl.load(tensor + token[:, None] * token_stride + at, mask=rows, other=0.0)


@triton.jit
@no_type_check
def of_head(
    tensor, token, row, head, length, batch, heads, K: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Load the first of K numbers of a head for each token, from a contiguous tensor."""
    at = ((token * batch + row) * heads + head)[:, None] * K + tl.arange(0, WIDTH)[None, :]
    return tl.load(tensor + at, mask=(token < length)[:, None], other=0.0)


@triton.jit
@no_type_check
def decay_gradients(rates, kept):
    """Sum all contributions across each token, to which its decay applies.

    ``rates``: for each token, its reads minus later reads of it; ``kept``: its contribution to
    the state after the chunk.
    """
    # The decay at a token applies to reads at it and later (a suffix sum of rates), and to
    # contributions of earlier tokens to the next state (a prefix sum of kept).
    return tl.sum(rates, 0) - tl.cumsum(rates, 0) + rates + tl.cumsum(kept, 0) - kept


@triton.jit
@no_type_check
def sum_of_tiles(first, tiles, stride):
    """Sum the shares of a number that programs of several tiles wrote."""
    result = tl.load(first)
    for tile in range(1, tiles):
        result += tl.load(first + tile * stride)
    return result
