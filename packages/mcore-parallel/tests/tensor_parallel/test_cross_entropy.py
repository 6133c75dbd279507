"""Vocabulary-parallel cross-entropy against torch.nn.functional.cross_entropy."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from warm_ranks import run_ranks

from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mcore_parallel.tensor_parallel.linear_cross_entropy import linear_cross_entropy

# float64: sums over ranks in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
V, S, B = 13, 4, 3


def axis_of(kind):
    if kind == "single":
        return SINGLE
    if kind in ("two", "four"):
        size = {"two": 2, "four": 4}[kind]
        return ParallelContext.build(ParallelConfig(tensor_model_parallel_size=size)).tp
    return ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2)).dp


def logits_and_labels(scale):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(S, B, V, generator=generator, dtype=torch.float64) * scale
    labels = torch.randint(V, (S, B), generator=generator)
    labels[0, 0], labels[0, 1] = 0, V - 1
    return logits, labels


def check(kind, padded, smoothing, scale, compiled):
    axis = axis_of(kind)
    logits, labels = logits_and_labels(scale)
    if scale == 1.0 and not smoothing:
        logits[1, :, 4:7] = -torch.inf  # tokens that a sampler or a mask forbids
        labels[1] = 2
    logits.requires_grad_()
    expected = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
    ).view(S, B)
    upstream = torch.arange(1.0, S * B + 1, dtype=torch.float64).view(S, B)
    (expected_grad,) = torch.autograd.grad(expected, logits, upstream)

    # Padding holds large scores: they must count for nothing.
    width = padded // axis.size
    own = slice(axis.rank * width, (axis.rank + 1) * width)
    everything = F.pad(logits.detach(), (0, padded - V), value=50.0 * scale)
    local = everything.transpose(0, 1)[..., own].contiguous().transpose(0, 1).requires_grad_()
    assert not local.is_contiguous()

    def loss_function(logits, labels):
        return vocab_parallel_cross_entropy(
            logits,
            labels,
            vocab_size=V,
            padded_vocab_size=padded,
            axis=axis,
            label_smoothing=smoothing,
        )

    if compiled and dist.get_rank() == 0:  # ranks trace alike, and slowly
        torch.compiler.reset()
        loss_function = torch.compile(loss_function, backend="aot_eager", fullgraph=True)
    loss = loss_function(local, labels)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected, **EXACT)
    loss.backward(upstream)
    torch.testing.assert_close(
        local.grad, F.pad(expected_grad, (0, padded - V))[..., own], **EXACT
    )


def check_all():
    for smoothing in (0.0, 0.1):
        for scale in (1.0, 1000.0):
            check("strided", 14, smoothing, scale, compiled=False)
            check("strided", 32, smoothing, scale, compiled=False)  # rank 1: padding only
            check("four", 16, smoothing, scale, compiled=False)


def check_compiled():
    check("two", 14, 0.0, 1.0, compiled=True)
    check("two", 32, 0.1, 1000.0, compiled=True)


def test_loss_and_gradient_equal_torch_with_padding_smoothing_and_wide_gaps():
    run_ranks(check_all, 4)


@pytest.mark.parity_long
def test_compiled_loss_equals_torch():
    run_ranks(check_compiled, 2, check_shapes=False)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_rank_equals_torch_with_padding(smoothing):
    check("single", 13, smoothing, 1.0, compiled=False)
    check("single", 20, smoothing, 1000.0, compiled=False)


def sum_of_gradients():
    axis = axis_of("strided")
    logits, labels = logits_and_labels(3.0)
    local = F.pad(logits, (0, 1)).chunk(2, -1)[axis.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(
        local, labels, vocab_size=V, axis=axis, label_smoothing=0.3
    )
    loss.sum().backward()
    return loss.detach(), local.grad.sum(-1), axis.ranks


def test_ranks_agree_on_the_loss_and_the_gradient_sums_to_zero_over_the_vocabulary():
    answers = run_ranks(sum_of_gradients, 4)
    for loss, _, ranks in answers:
        assert torch.equal(loss, answers[0][0])
        total = sum(answers[rank][1] for rank in ranks)
        torch.testing.assert_close(total, torch.zeros_like(total), atol=1e-12, rtol=0.0)


def test_bfloat16_logits_are_computed_in_float32_and_get_bfloat16_gradients():
    logits, labels = logits_and_labels(3.0)
    low = logits.bfloat16().requires_grad_()
    loss = vocab_parallel_cross_entropy(low, labels, vocab_size=V)
    assert loss.dtype == torch.float32
    wide = low.detach().float().requires_grad_()
    expected = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none")
    # Same float32 arithmetic, in another order.
    torch.testing.assert_close(loss.flatten(), expected, rtol=1e-5, atol=1e-6)
    loss.sum().backward()
    expected.sum().backward()
    assert torch.equal(low.grad, wide.grad.bfloat16()) or torch.allclose(
        low.grad.float(), wide.grad, rtol=2**-8, atol=1e-6
    )


def test_gathered_logits_are_refused_before_anything_is_sent():
    logits, labels = logits_and_labels(1.0)
    axis = Axis("tp", 2, 0, None, (0, 1))
    with pytest.raises(ValueError, match="not gathered ones"):
        vocab_parallel_cross_entropy(
            F.pad(logits, (0, 1)), labels, vocab_size=V, padded_vocab_size=14, axis=axis
        )
    with pytest.raises(ValueError, match="13 columns on each of 2 ranks"):
        vocab_parallel_cross_entropy(logits, labels, vocab_size=V, axis=axis)


@pytest.mark.parametrize("bad", [-100, V])
def test_a_label_outside_the_vocabulary_is_refused(bad):
    logits, labels = logits_and_labels(1.0)
    labels[2, 1] = bad
    with pytest.raises(ValueError, match="labels lie in"):
        vocab_parallel_cross_entropy(
            F.pad(logits, (0, 3)), labels, vocab_size=V, padded_vocab_size=16
        )


def bad_label_in_compiled_code():
    logits, labels = logits_and_labels(1.0)
    labels[2, 1] = -100
    compiled = torch.compile(vocab_parallel_cross_entropy, backend="aot_eager", fullgraph=True)
    return compiled(logits, labels, vocab_size=V)


def test_a_bad_label_where_nothing_is_checked_gives_nan_not_a_number_that_looks_right():
    (loss,) = run_ranks(bad_label_in_compiled_code, 1, check_shapes=False)
    assert loss.isnan().nonzero().tolist() == [[2, 1]]


def test_smoothing_of_one_or_more_is_refused():
    logits, labels = logits_and_labels(1.0)
    with pytest.raises(ValueError, match=r"label smoothing 1\.0 must be"):
        vocab_parallel_cross_entropy(logits, labels, vocab_size=V, label_smoothing=1.0)


def labels_of_other_tokens():
    told = []
    logits, labels = torch.zeros(3, 2, 5), torch.zeros(2, 3, dtype=torch.long)
    weight, weights = torch.zeros(5, 4), torch.ones(2, 3)
    try:
        vocab_parallel_cross_entropy(logits, labels, vocab_size=5)
    except ValueError as error:
        told.append(str(error))
    try:
        linear_cross_entropy(torch.zeros(6, 2, 4), weight, labels, weights, vocab_size=5)
    except ValueError as error:
        told.append(str(error))
    return told


def test_labels_of_other_tokens_are_refused():
    ((split, fused),) = run_ranks(labels_of_other_tokens, 1, check_shapes=False)
    assert "labels [2, 3] do not fit logits [3, 2, 5]" in split
    assert "do not fit hidden states [6, 2, 4]" in fused
