"""Ring attention, and attention to gathered keys, against attention of one rank."""

from itertools import pairwise

import pytest
import torch
from warm_ranks import run_ranks

from mcore_parallel.collectives import start_shift, wait
from mcore_parallel.config import ParallelConfig
from mcore_parallel.context_parallel.all_gather_attention import (
    all_gather_attention,
    gathered_blocks,
)
from mcore_parallel.context_parallel.block_attention import PLAIN_BLOCKS
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.context_parallel.ring_attention import ring_attention, ring_blocks
from mcore_parallel.context_parallel.zigzag import zigzag_split
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.rng import fill_normal_

# float64: softmax sums of at most 16 terms in another order.
EXACT = {"rtol": 1e-11, "atol": 1e-11}
S, B, N, H = 16, 3, 4, 6


def normal(name, *shape):
    x = torch.empty(shape, dtype=torch.float64)
    fill_normal_(x, seed=3, name=name, shape=shape, offsets=(0,) * len(shape), std=1.0)
    return x


# Rows of one, of many and of two documents, whose borders lie in, between and on chunks.
PACKED = ((0, S), (0, 1, 3, 4, 9, 14, S), (0, 6, S))


def plain_attention(q, k, v, rows=((0, S),) * B):
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [S, B, N, H] -> [B, N, S, H]
    k, v = (x.repeat_interleave(N // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / H**0.5
    seen = torch.zeros(B, 1, S, S, dtype=torch.bool)
    for row, borders in enumerate(rows):
        for begin, end in pairwise(borders):
            seen[row, :, begin:end, begin:end] = True
    seen = seen.tril()
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).permute(2, 0, 1, 3)


def axis_of(kind):
    if kind == "single":
        return SINGLE
    if kind == "two":
        return ParallelContext.build(ParallelConfig(context_parallel_size=2)).cp
    if kind == "four":
        return ParallelContext.build(ParallelConfig(context_parallel_size=4)).cp
    config = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2)
    axis = ParallelContext.build(config).cp
    assert axis.ranks[1] - axis.ranks[0] == 2
    return axis


def check(attend, kind, num_kv_heads, scale=1.0, compiled=False, packed=None):
    axis = axis_of(kind)
    # Scores far apart: without the running maximum a merged softmax would overflow.
    q, k = normal("q", S, B, N, H) * scale, normal("k", S, B, num_kv_heads, H) * scale
    v = normal("v", S, B, num_kv_heads, H - 2)
    whole = [x.requires_grad_() for x in (q, k, v)]
    expected = plain_attention(*whole) if packed is None else plain_attention(*whole, packed)
    upstream = normal("grad", *expected.shape)
    expected.backward(upstream)
    if compiled:
        torch.compiler.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    local = [
        zigzag_split(x.detach(), axis).transpose(0, 1).contiguous().transpose(0, 1)
        for x in whole
    ]
    local = [x.requires_grad_() for x in local]
    documents = () if packed is None else (Documents(packed),)
    out = attend(*local, axis, PLAIN_BLOCKS, *documents)
    torch.testing.assert_close(out, zigzag_split(expected, axis), **EXACT)
    out.backward(zigzag_split(upstream, axis))
    for own, reference in zip(local, whole, strict=True):
        torch.testing.assert_close(own.grad, zigzag_split(reference.grad, axis), **EXACT)


def check_all(attend):
    for kind in ("strided", "four"):
        for num_kv_heads in (4, 2, 1):
            check(attend, kind, num_kv_heads)
        check(attend, kind, 2, scale=20.0)
        check(attend, kind, 2, packed=PACKED)


def check_compiled():
    check(ring_attention, "two", 2, compiled=True)
    check(all_gather_attention, "two", 2, compiled=True)


both_kinds = pytest.mark.parametrize("attend", [ring_attention, all_gather_attention])


@both_kinds
def test_two_and_four_ranks_equal_one_with_grouped_heads_large_scores_and_packed_rows(attend):
    run_ranks(check_all, 4, attend)


@pytest.mark.parity_long
def test_compiled_attention_equals_one_rank():
    run_ranks(check_compiled, 2, check_shapes=False)


@both_kinds
def test_one_rank_is_plain_attention(attend):
    check(attend, "single", 2)
    check(attend, "single", 2, packed=PACKED)


def triangles(borders):
    return sum((b - a) * (b - a + 1) // 2 for a, b in pairwise(borders))


def scores_computed(blocks):
    """Queries times keys of all blocks, causal squares counted as triangles."""
    total = 0
    for block in blocks:
        rows = block.queries.stop - block.queries.start
        borders = (0, rows) if block.pieces is None else block.pieces.borders
        columns = block.keys.stop - block.keys.start
        total += triangles(borders) if block.causal else rows * columns
    return total


@pytest.mark.parametrize("size", [1, 2, 4])
def test_blocks_cover_what_is_seen_and_nothing_more(size):
    length = S // size
    axes = [Axis("cp", size, rank, None, tuple(range(size))) for rank in range(size)]
    for rows in (None, PACKED):
        documents = None if rows is None else Documents(rows)
        seen = sum(triangles(borders) for borders in rows or ((0, S),))
        ring = [
            block
            for axis in axes
            for step in range(size)
            for block in ring_blocks(length, axis, step, documents)
        ]
        gathered = [b for axis in axes for b in gathered_blocks(length, axis, documents)]
        assert scores_computed(ring) == seen
        assert scores_computed(gathered) == seen


def shifted():
    axis = axis_of("four")
    x = torch.arange(6.0).view(3, 2).t() + 10 * axis.rank
    received = wait(start_shift(x, axis))
    assert torch.equal(received, x + 10 * ((axis.rank - 1) % 4 - axis.rank))


def test_a_shift_brings_what_the_previous_rank_holds():
    run_ranks(shifted, 4)
    x = torch.ones(2)
    assert start_shift(x, SINGLE) is x


def test_bfloat16_is_summed_in_float32():
    q, k, v = (normal(n, S, B, N, H).bfloat16() for n in "qkv")
    out = ring_attention(q, k, v, SINGLE, PLAIN_BLOCKS)
    assert out.dtype == torch.bfloat16
    expected = plain_attention(*(x.double() for x in (q, k, v)))
    # One rounding, of the result: half a unit in the last of 8 bits.
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)


def test_a_length_that_does_not_divide_is_refused_before_anything_is_sent():
    x = torch.zeros(3, 1, 2, 4)
    axis = Axis("cp", 2, 0, None, (0, 1))
    for attend in (ring_attention, all_gather_attention):
        with pytest.raises(ValueError, match="--seq-length 6 cannot be cut"):
            attend(x, x, x, axis, PLAIN_BLOCKS)


def test_heads_that_do_not_fit_are_refused_before_anything_is_sent():
    q, k, axis = (
        torch.zeros(4, 1, 4, 4),
        torch.zeros(4, 1, 3, 4),
        Axis("cp", 2, 0, None, (0, 1)),
    )
    for attend in (ring_attention, all_gather_attention):
        with pytest.raises(ValueError, match=r"keys \[4, 1, 3, 4\] .* do not fit queries"):
            attend(q, k, k, axis, PLAIN_BLOCKS)


def test_documents_of_another_batch_are_refused_before_anything_is_sent():
    x, axis = torch.zeros(4, 1, 2, 4), Axis("cp", 2, 0, None, (0, 1))
    for attend in (ring_attention, all_gather_attention):
        with pytest.raises(ValueError, match="2 rows of 8 tokens, but the batch has 1 rows"):
            attend(x, x, x, axis, PLAIN_BLOCKS, Documents([[0, 8], [0, 3, 8]]))
