"""Norms against their formulas."""

import pytest
import torch

from mcore_models.config import TransformerConfig
from mcore_models.layers.norm import LayerNorm, RMSNorm, build_norm
from mcore_parallel import ParallelContext, named_shards


def slow_norm(x, weight, bias, epsilon):
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    scaled = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
    return scaled if bias is None else scaled + bias


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_follow_their_formula_forward_and_backward(kind, zero_centered):
    norm = kind(5, epsilon=1e-3, zero_centered=zero_centered, dtype=torch.float64)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(3, 2, 5, dtype=torch.float64)
    weight = norm.weight + 1 if zero_centered else norm.weight
    want = slow_norm(x, weight, getattr(norm, "bias", None), 1e-3)
    tensors = [x, *norm.parameters()]
    want_grads = torch.autograd.grad(want, tensors, dy)
    got = norm(x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(got, tensors, dy), want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_new_norm_changes_only_scale_and_mean(kind, zero_centered):
    norm = kind(4, epsilon=1e-12, zero_centered=zero_centered, dtype=torch.float64)
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(norm(x), x)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_statistics_of_bfloat16_are_float32(kind):
    x = (torch.randn(4, 512) + 50).bfloat16()
    norm = kind(512, dtype=torch.bfloat16)
    want = kind(512, dtype=torch.float64)(x.double())
    torch.testing.assert_close(norm(x).double(), want, rtol=1.6e-2, atol=1e-2)


def test_the_config_chooses_the_norm():
    base = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    made = build_norm(TransformerConfig(**base, norm_epsilon=0.5), 8)
    assert isinstance(made, RMSNorm)
    assert made.epsilon == 0.5
    options = {"normalization": "LayerNorm", "apply_layernorm_1p": True}
    made = build_norm(TransformerConfig(**base, **options), 8)
    assert isinstance(made, LayerNorm)
    assert made.weight.tolist() == [0.0] * 8


def test_weights_name_the_ranks_that_hold_them():
    ctx = ParallelContext.single()
    shards = named_shards(LayerNorm(3, replicas=ctx.tp, partial=ctx.tp))
    assert {name: shard.shape for name, shard in shards.items()} == {
        "weight": (3,),
        "bias": (3,),
    }


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_a_norm_may_add_a_branch_first(kind):
    norm = kind(6, dtype=torch.float64)
    x, branch = torch.randn(2, 3, 2, 6, dtype=torch.float64).unbind()
    normed, total = norm.add_and_norm(x, branch)
    assert torch.equal(total, x + branch)
    assert torch.equal(normed, norm(x + branch))
