"""Zigzag cuts and attention over context ranks against one rank."""

import pytest
import torch
import torch.distributed as dist
from warm_ranks import run_ranks

from mcore_parallel.collectives import all_gather
from mcore_parallel.config import ParallelConfig
from mcore_parallel.context_parallel.zigzag import (
    context_attention,
    ulysses_attention,
    zigzag_join,
    zigzag_positions,
    zigzag_split,
)
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.rng import fill_normal_

# float64: softmax sums of at most 16 terms in another order.
EXACT = {"rtol": 1e-11, "atol": 1e-11}
S, B, N, H = 16, 3, 8, 6


def normal(name, *shape):
    x = torch.empty(shape, dtype=torch.float64)
    fill_normal_(x, seed=3, name=name, shape=shape, offsets=(0,) * len(shape), std=1.0)
    return x


def plain_attention(q, k, v):
    """Causal, lower-right aligned, with query heads grouped over key heads."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [S, B, N, H] -> [B, N, S, H]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).permute(2, 0, 1, 3)


def rotate(x, positions):
    """Rotary positions, so that a token cut with a wrong position is seen."""
    half = x.shape[-1] // 2
    angle = positions.view(-1, 1, 1, 1) * 0.7 ** torch.arange(1.0, half + 1).double()
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def axis_of(kind):
    if kind in ("two", "four"):
        size = {"two": 2, "four": 4}[kind]
        return ParallelContext.build(ParallelConfig(context_parallel_size=size)).cp
    # cp over {0,2}, {1,3}: the tensor ranks lie between.
    config = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2)
    axis = ParallelContext.build(config).cp
    assert axis.ranks[1] - axis.ranks[0] == 2
    return axis


def check(kind, attend, num_kv_heads, compiled):
    axis = axis_of(kind)
    q, k = normal("q", S, B, N, H), normal("k", S, B, num_kv_heads, H)
    v = normal("v", S, B, num_kv_heads, H - 2)
    whole = [x.requires_grad_() for x in (q, k, v)]
    positions = torch.arange(S)
    expected = plain_attention(rotate(q, positions), rotate(k, positions), v)
    upstream = normal("grad", *expected.shape)
    expected.backward(upstream)

    def model(q, k, v, positions):
        return attend(rotate(q, positions), rotate(k, positions), v, axis, plain_attention)

    if compiled and dist.get_rank() == 0:  # ranks trace alike, and slowly
        torch.compiler.reset()
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    # Memory order as a projection of [S, B, ...] leaves it, not that of [S, B, N, H].
    local = [
        zigzag_split(x.detach(), axis).transpose(0, 1).contiguous().transpose(0, 1)
        for x in whole
    ]
    local = [x.requires_grad_() for x in local]
    out = model(*local, zigzag_positions(S, axis))
    torch.testing.assert_close(out, zigzag_split(expected, axis), **EXACT)
    out.backward(zigzag_split(upstream, axis))
    for own, reference in zip(local, whole, strict=True):
        torch.testing.assert_close(own.grad, zigzag_split(reference.grad, axis), **EXACT)


def check_all():
    for num_kv_heads in (8, 4, 1):
        check("strided", context_attention, num_kv_heads, compiled=False)
        check("four", context_attention, num_kv_heads, compiled=False)
    check("strided", ulysses_attention, 2, compiled=False)
    check("four", ulysses_attention, 8, compiled=False)
    check("four", ulysses_attention, 4, compiled=False)
    check("four", ulysses_attention, 2, compiled=False)
    check("strided", ulysses_attention, 1, compiled=False)


def check_compiled():
    check("two", context_attention, 4, compiled=True)
    check("two", ulysses_attention, 4, compiled=True)


def test_attention_over_two_and_four_ranks_equals_one_rank_with_rotary_and_grouped_heads():
    run_ranks(check_all, 4)


@pytest.mark.parity_long
def test_compiled_attention_equals_one_rank():
    run_ranks(check_compiled, 2, check_shapes=False)


def test_one_rank_attends_as_given():
    q, k, v = normal("q", S, B, N, H), normal("k", S, B, 2, H), normal("v", S, B, 2, H)
    expected = plain_attention(q, k, v)
    assert torch.equal(context_attention(q, k, v, SINGLE, plain_attention), expected)
    assert torch.equal(ulysses_attention(q, k, v, SINGLE, plain_attention), expected)
    assert zigzag_split(q, SINGLE) is q
    assert zigzag_join(q, SINGLE) is q


def fake_axis(size, rank):
    return Axis("cp", size, rank, None, tuple(range(size)))


def test_two_ranks_hold_chunks_0_3_and_1_2():
    positions = [zigzag_positions(8, fake_axis(2, rank)).tolist() for rank in range(2)]
    assert positions == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_token_has_one_rank_and_the_ranks_have_equal_causal_work(size):
    length = 12 * size
    positions = [
        zigzag_positions(length, fake_axis(size, rank) if size > 1 else SINGLE)
        for rank in range(size)
    ]
    assert sorted(torch.cat(positions).tolist()) == list(range(length))
    assert len({int((p + 1).sum()) for p in positions}) == 1


def test_labels_cut_after_the_shift_keep_every_pair_of_position_and_target():
    tokens = torch.arange(100, 117).repeat(2, 1)  # [B, S + 1]
    pairs = set()
    for rank in range(2):
        axis = fake_axis(2, rank)
        inputs = zigzag_split(tokens[:, :-1], axis, dim=1)
        labels = zigzag_split(tokens[:, 1:], axis, dim=1)
        assert torch.equal(labels, inputs + 1)
        own = zip(zigzag_positions(16, axis).tolist(), labels[0].tolist(), strict=True)
        pairs |= set(own)
    assert pairs == {(i, 101 + i) for i in range(16)}


def check_join():
    axis = axis_of("four")
    for dim in (0, 1, -1):
        whole = normal("x", 8, 16, 24)
        own = zigzag_split(whole, axis, dim).clone().requires_grad_()
        joined = zigzag_join(own, axis, dim)
        assert torch.equal(joined, whole)
        gradients = [normal(f"grad {rank}", 8, 16, 24) for rank in range(4)]
        joined.backward(gradients[axis.rank])
        torch.testing.assert_close(own.grad, zigzag_split(sum(gradients), axis, dim), **EXACT)
    # Rank after rank is not natural order.
    assert not torch.equal(all_gather(own.detach(), axis, -1), whole)


def test_join_undoes_split_along_any_dimension_and_sums_the_gradients_of_all_ranks():
    run_ranks(check_join, 4)


def test_lengths_and_heads_that_do_not_divide_are_refused_before_anything_is_sent():
    axis = fake_axis(2, 0)
    with pytest.raises(ValueError, match="--seq-length 10 cannot be cut over --context"):
        zigzag_split(torch.zeros(10), axis)
    with pytest.raises(ValueError, match="must be a multiple of 4"):
        zigzag_positions(6, axis)
    q, k = torch.zeros(3, 1, 2, 4), torch.zeros(3, 1, 1, 4)
    with pytest.raises(ValueError, match="--seq-length 6"):
        context_attention(q, k, k, axis, plain_attention)
    q, k = torch.zeros(4, 1, 3, 4), torch.zeros(4, 1, 1, 4)
    with pytest.raises(ValueError, match="3 query heads on this rank cannot be exchanged"):
        ulysses_attention(q, k, k, axis, plain_attention)


def test_an_attention_that_returns_another_order_of_dimensions_is_refused():
    q = torch.zeros(4, 1, 2, 3)
    for attend in (context_attention, ulysses_attention):
        with pytest.raises(ValueError, match=r"returned \[1, 2, 4, 3\] .* here \[4, 1, 2, 3\]"):
            attend(q, q, q, SINGLE, lambda q, k, v: q.permute(1, 2, 0, 3))
