"""Ring attention against attention of one rank."""

import pytest
import torch

from mcore_parallel.collectives import start_shift, wait
from mcore_parallel.config import ParallelConfig
from mcore_parallel.context_parallel import zigzag_split
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.ring import PLAIN_BLOCKS, ring_attention
from mcore_parallel.rng import fill_normal_
from mcore_parallel.testing import run_ranks

# float64: softmax sums of at most 16 terms in another order.
EXACT = {"rtol": 1e-11, "atol": 1e-11}
S, B, N, H = 16, 3, 4, 6


def normal(name, *shape):
    x = torch.empty(shape, dtype=torch.float64)
    fill_normal_(x, seed=3, name=name, shape=shape, offsets=(0,) * len(shape), std=1.0)
    return x


def plain_attention(q, k, v):
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [S, B, N, H] -> [B, N, S, H]
    k, v = (x.repeat_interleave(N // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / H**0.5
    seen = torch.ones(S, S, dtype=torch.bool).tril()
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


def check(kind, num_kv_heads, scale, compiled):
    axis = axis_of(kind)
    # Scores far apart: without the running maximum a merged softmax would overflow.
    q, k = normal("q", S, B, N, H) * scale, normal("k", S, B, num_kv_heads, H) * scale
    v = normal("v", S, B, num_kv_heads, H - 2)
    whole = [x.requires_grad_() for x in (q, k, v)]
    expected = plain_attention(*whole)
    upstream = normal("grad", *expected.shape)
    expected.backward(upstream)
    attend = ring_attention
    if compiled:
        torch.compiler.reset()
        attend = torch.compile(ring_attention, backend="aot_eager", fullgraph=True)
    local = [
        zigzag_split(x.detach(), axis).transpose(0, 1).contiguous().transpose(0, 1)
        for x in whole
    ]
    local = [x.requires_grad_() for x in local]
    out = attend(*local, axis, PLAIN_BLOCKS)
    torch.testing.assert_close(out, zigzag_split(expected, axis), **EXACT)
    out.backward(zigzag_split(upstream, axis))
    for own, reference in zip(local, whole, strict=True):
        torch.testing.assert_close(own.grad, zigzag_split(reference.grad, axis), **EXACT)


def check_all():
    for kind in ("strided", "four"):
        for num_kv_heads in (4, 2, 1):
            check(kind, num_kv_heads, 1.0, compiled=False)
        check(kind, 2, 20.0, compiled=False)


def check_compiled():
    check("two", 2, 1.0, compiled=True)


def test_ring_over_two_and_four_ranks_equals_one_rank_with_grouped_heads_and_large_scores():
    run_ranks(check_all, 4)


def test_compiled_ring_equals_one_rank():
    run_ranks(check_compiled, 2, check_shapes=False)


def test_a_ring_of_one_is_plain_attention():
    check("single", 2, 1.0, compiled=False)


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
    with pytest.raises(ValueError, match="--seq-length 6 cannot be cut"):
        ring_attention(x, x, x, Axis("cp", 2, 0, None, (0, 1)), PLAIN_BLOCKS)
