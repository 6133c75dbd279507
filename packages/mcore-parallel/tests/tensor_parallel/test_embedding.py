"""Vocabulary-parallel embedding and head against torch's embedding and linear."""

import pytest
import torch
import torch.nn.functional as F
from warm_ranks import run_ranks

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.rng import fill_normal_
from mcore_parallel.sharding import named_shards
from mcore_parallel.tensor_parallel.embedding import (
    VocabParallelEmbedding,
    VocabParallelHead,
    padded_vocab,
)

# float64: sums over a few ranks and tokens in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
V, D, B, S = 13, 5, 3, 8


def normal(name, *shape):
    x = torch.empty(shape, dtype=torch.float64)
    fill_normal_(x, seed=3, name=name, shape=shape, offsets=(0,) * len(shape), std=1.0)
    return x


def fake_axis(size, rank):
    return Axis("tp", size, rank, None, tuple(range(size)))


def axis_of(kind):
    if kind == "single":
        return SINGLE
    if kind in ("two", "four"):
        size = {"two": 2, "four": 4}[kind]
        return ParallelContext.build(ParallelConfig(tensor_model_parallel_size=size)).tp
    return ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2)).dp


def check(kind, padded, sequence_parallel, compiled):
    axis = axis_of(kind)
    options = {
        "padded_vocab_size": padded,
        "axis": axis,
        "sequence_parallel": sequence_parallel,
        "dtype": torch.float64,
    }
    embedding = VocabParallelEmbedding(V, D, **options)
    head = VocabParallelHead(D, V, **options)
    assert embedding.padded_vocab_size == head.padded_vocab_size >= V
    for layer in (embedding, head):
        layer.reset_parameters(seed=3)
        (shard,) = named_shards(layer).values()
        assert shard.shape == (V, D)
        assert sum(piece.data.numel() for piece in shard.pieces) <= layer.weight.numel()

    table = torch.empty(V, D, dtype=torch.float64)
    fill_normal_(table, seed=3, name="weight", shape=(V, D), offsets=(0, 0), std=0.02)
    table = F.pad(table, (0, 0, 0, head.padded_vocab_size - V)).requires_grad_()
    own = slice(axis.rank * head.weight.shape[0], (axis.rank + 1) * head.weight.shape[0])
    assert torch.equal(embedding.weight, table[own])
    assert torch.equal(head.weight, table[own])

    # Every token, some twice, columns of unequal content, not contiguous.
    ids = (torch.arange(B * S).view(S, B).t() * 7) % V
    expected = F.embedding(ids.t(), table)
    expected_logits = F.linear(expected, table)
    upstream = normal("grad", S, B, V)
    upstream = F.pad(upstream, (0, head.padded_vocab_size - V))
    expected_logits.backward(upstream)

    def model(ids):
        return head(embedding(ids), embedding.weight)

    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    hidden = embedding(ids)
    kept = hidden.shape[0]
    assert kept == (S // axis.size if sequence_parallel else S)
    first = axis.rank * kept if sequence_parallel else 0
    torch.testing.assert_close(hidden, expected[first : first + kept], **EXACT)
    logits = run(ids)
    torch.testing.assert_close(logits, expected_logits[..., own], **EXACT)
    logits.backward(upstream[..., own])
    torch.testing.assert_close(embedding.weight.grad, table.grad[own], **EXACT)

    if not compiled:  # both uses of the tied table add to its main gradient themselves
        embedding.weight.grad = None
        grad_slot(embedding.weight).main = torch.ones_like(embedding.weight)
        told = []
        grad_slot(embedding.weight).on_ready = lambda: told.append(True)
        model(ids).backward(upstream[..., own])
        assert embedding.weight.grad is None
        assert told == [True, True]
        torch.testing.assert_close(
            grad_slot(embedding.weight).main, 1 + table.grad[own], **EXACT
        )


def check_all():
    for kind, padded in (("strided", 0), ("four", 16), ("four", 24)):
        check(kind, padded, sequence_parallel=False, compiled=False)
        check(kind, padded, sequence_parallel=True, compiled=False)


def check_compiled():
    check("two", 0, sequence_parallel=False, compiled=True)
    torch.compiler.reset()
    check("two", 18, sequence_parallel=True, compiled=True)


def test_embedding_and_tied_head_equal_torch_with_a_padded_vocabulary():
    run_ranks(check_all, 4)


@pytest.mark.parity_long
def test_compiled_embedding_and_head_equal_torch():
    run_ranks(check_compiled, 2, check_shapes=False)


def test_one_rank_is_plain_torch():
    check("single", 0, True, compiled=False)
    check("single", 16, True, compiled=False)


def test_padded_vocabulary_is_the_next_multiple_of_divisor_times_ranks():
    assert padded_vocab(50257, 128, 1) == 50304
    assert padded_vocab(50257, 128, 8) == 51200
    assert padded_vocab(50304, 128, 1) == 50304
    assert padded_vocab(1, 1, 1) == 1


@pytest.mark.parametrize("bad", [-1, V])
def test_an_id_outside_the_vocabulary_is_refused_though_padding_has_a_row_for_it(bad):
    embedding = VocabParallelEmbedding(V, D, padded_vocab_size=16)
    ids = torch.zeros(B, S, dtype=torch.int64)
    ids[1, 2] = bad
    with pytest.raises(ValueError, match=f"outside the vocabulary 0 to {V - 1}"):
        embedding(ids)


@pytest.mark.parametrize("padded", [12, 15])
def test_a_padded_size_too_small_or_not_divisible_is_refused(padded):
    with pytest.raises(ValueError, match="use 14 or leave it 0"):
        VocabParallelEmbedding(V, D, padded_vocab_size=padded, axis=fake_axis(2, 0))


def test_padding_rows_are_zero_and_no_part_of_the_logical_tensor():
    for rank, true_rows in ((0, 5), (1, 5), (2, 3), (3, 0)):
        head = VocabParallelHead(D, V, padded_vocab_size=20, axis=fake_axis(4, rank))
        assert not head.weight[true_rows:].any()
        shard = named_shards(head)["weight"]
        assert sum(piece.lengths[0] for piece in shard.pieces) == true_rows
