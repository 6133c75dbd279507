"""Adapters by their formulas, on one rank; layouts are held to one rank in tests/parity."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.logical_tensors import tensor_shapes
from mcore_models.peft.attaching import (
    adapted_linears,
    attach_adapters,
    merge_adapters,
    start_magnitudes,
)
from mcore_models.peft.config import PeftConfig, is_meant, linears
from mcore_models.peft.lora import full_weight
from mcore_moe.config import MoEConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.rng import RngStreams
from mcore_parallel.sharding import named_parameters
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, LinearOutput

SMALL = TransformerConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=24,
    add_qkv_bias=True,
)
LATENT = TransformerConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=12,
    multi_latent_attention=True,
    q_lora_rank=6,
    kv_lora_rank=5,
    qk_head_dim=3,
    qk_pos_emb_head_dim=4,
    v_head_dim=5,
)


def streams():
    return RngStreams(1, ParallelContext.single())


def gpt(config=SMALL, **options):
    single = ParallelContext.single()
    return GPT(config, single, vocab_size=13, dtype=torch.float64, **options)


def with_adapters(model, **options):
    """Attach adapters, and move what begins as zeros or ones."""
    attach_adapters(model, PeftConfig(lora_dim=3, **options), streams=streams())
    generator = torch.Generator().manual_seed(3)
    for _, adapter in adapted_linears(model):
        for moved in (adapter.lora_B, adapter.magnitude):
            if moved is not None:
                noise = torch.randn(moved.shape, generator=generator, dtype=torch.float64)
                moved.data.add_(0.3 * noise)
    return model


class Fused(nn.Module):
    """A linear of three outputs, named as a model names its own."""

    def __init__(self):
        super().__init__()
        outputs = [LinearOutput("q", 4), LinearOutput("k", 2), LinearOutput("v", 2)]
        linear = ColumnParallelLinear(5, outputs, bias=True, dtype=torch.float64, init_std=1.0)
        nn.init.normal_(linear.bias)
        self.blocks = nn.ModuleDict({"0": nn.ModuleDict({"qkv": linear})})


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_output_is_that_of_the_formula_for_the_outputs_that_are_meant(kind):
    model = Fused()
    linear = model.blocks["0"]["qkv"]
    weight, bias = linear.weight.detach().clone(), linear.bias.detach()
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    before = linear(x)
    attach_adapters(
        model,
        PeftConfig(peft=kind, lora_dim=2, lora_alpha=3.0, lora_target_modules=("q", "v")),
        streams=streams(),
    )
    torch.testing.assert_close(linear(x), before)
    adapter = linear.adapter
    nn.init.normal_(adapter.lora_B)
    down, up = adapter.lora_A.detach(), adapter.lora_B.detach()
    total = weight.clone()
    total[:4] += 1.5 * up[:4] @ down[:2]
    total[6:] += 1.5 * up[4:] @ down[2:]
    if kind == "dora":
        adapter.magnitude.data.add_(torch.rand(6))
        lengths = total.norm(dim=1)[[0, 1, 2, 3, 6, 7]]
        total[[0, 1, 2, 3, 6, 7]] *= (adapter.magnitude.detach() / lengths)[:, None]
    torch.testing.assert_close(linear(x), F.linear(x, total, bias))
    torch.testing.assert_close(full_weight(linear), total)
    merge_adapters(model)
    torch.testing.assert_close(linear.weight.detach(), total)
    torch.testing.assert_close(linear(x), F.linear(x, total, bias))


def test_gradients_are_those_of_the_formula_and_the_base_gets_none():
    model = Fused()
    linear = model.blocks["0"]["qkv"]
    config = PeftConfig(peft="dora", lora_dim=2, lora_target_modules=("qkv",))
    attach_adapters(model, config, streams=streams())
    adapter, x = linear.adapter, torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    nn.init.normal_(adapter.lora_B)
    linear(x).square().sum().backward()
    mine = [t.grad.clone() for t in (x, adapter.lora_A, adapter.lora_B, adapter.magnitude)]
    assert linear.weight.grad is None
    assert linear.bias.grad is None
    leaves = [
        t.detach().clone().requires_grad_()
        for t in (x, adapter.lora_A, adapter.lora_B, adapter.magnitude)
    ]
    x, down, up, magnitude = leaves
    pieces = zip(up.split([4, 2, 2]), down.split(2), strict=True)
    total = linear.weight + adapter.scale * torch.cat([b @ a for b, a in pieces])
    gain = magnitude / total.detach().norm(dim=1)
    (F.linear(x, total) * gain + linear.bias).square().sum().backward()
    for found, leaf in zip(mine, leaves, strict=True):
        torch.testing.assert_close(found, leaf.grad)


def test_dropout_drops_what_adapters_read_and_nothing_else():
    model = with_adapters(gpt(), peft="lora", lora_dropout=0.5)
    tokens = torch.arange(12).view(2, 6)
    dropped = model(tokens)[0]
    assert not torch.equal(dropped, model(tokens)[0])
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])
    for _, adapter in adapted_linears(model.train()):
        adapter.lora_B.data.zero_()
    assert torch.equal(model(tokens)[0], model(tokens)[0])


def test_magnitudes_begin_as_lengths_of_the_rows_that_were_loaded():
    model = gpt()
    attach_adapters(model, PeftConfig(peft="dora"), streams=streams())
    for linear, _ in adapted_linears(model):
        linear.weight.data.mul_(3.0)
    start_magnitudes(model)
    for linear, adapter in adapted_linears(model):
        torch.testing.assert_close(adapter.magnitude.detach(), linear.weight.norm(dim=1))


def test_only_adapters_of_the_linears_that_are_meant_are_trained():
    moe = MoEConfig(num_experts=4, moe_ffn_hidden_size=8, moe_layer_freq="[0,1]")
    shapes = tensor_shapes(SMALL, 13, moe)
    config = PeftConfig(peft="lora", lora_dim=3, lora_target_modules=("experts", "v_proj"))
    model = gpt(moe=moe)
    attach_adapters(model, config, streams=streams())
    trained = {
        part.name.replace(".adapter.", ".").replace(".lora_A.weight", "")
        for named in named_parameters(model)
        for part in named.layout.parts
        if named.parameter.requires_grad and part.name.endswith("lora_A.weight")
    }
    assert trained == {name for name in linears(shapes) if config.is_target(name)}
    assert {"blocks.0.attention.qkv.v", "blocks.1.moe.experts.3.fc1.up"} <= trained
    assert not any("fc2" in name and "blocks.0" in name for name in trained)


@pytest.mark.parametrize(
    ("pattern", "name", "is_one"),
    [
        ("all-linear", "blocks.0.mlp.fc1.up", True),
        ("all-linear", "blocks.0.moe.experts.3.fc2", False),
        ("experts", "blocks.0.moe.experts.3.fc2", True),
        ("q", "blocks.0.attention.qkv.q", True),
        ("q", "blocks.0.mla.q_up", False),
        ("linear_qkv", "blocks.11.attention.qkv.k", True),
        ("o_proj", "blocks.1.attention.proj", True),
        ("blocks.1", "blocks.11.attention.proj", False),
        ("blocks.[01].attention.*.q", "blocks.1.attention.qkv.q", True),
        ("attention.q", "blocks.1.attention.qkv.q", False),
    ],
)
def test_a_pattern_means_linears_by_words_of_their_names(pattern, name, is_one):
    assert is_meant(pattern, name) is is_one


def test_norms_of_single_heads_and_routers_are_no_linears():
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        qk_layernorm=True,
        qk_norm_width="own_head",
    )
    shapes = tensor_shapes(config, 4, MoEConfig(num_experts=2))
    assert len(shapes["blocks.0.attention.q_norm.weight"]) == 2
    named = {
        name.removeprefix("blocks.0.").partition(".experts.")[0] for name in linears(shapes)
    }
    parts = {f"attention.qkv.{part}" for part in "qkv"}
    assert named == {*parts, "attention.proj", "moe"}


def test_latent_attention_decodes_with_its_adapters():
    model = with_adapters(gpt(LATENT), peft="dora").eval()
    merged = with_adapters(gpt(LATENT), peft="dora").eval()
    merge_adapters(merged)
    weights = [full_weight(m.blocks["0"].mla.kv_up) for m in (model, merged)]
    torch.testing.assert_close(*weights)
    tokens = torch.arange(12).view(2, 6)
    torch.testing.assert_close(model(tokens)[0], merged(tokens)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_dim": 0}, "--lora-dim 0"),
        ({"lora_alpha": 0.0}, "--lora-alpha 0.0"),
        ({"lora_dropout": 1.0}, "--lora-dropout 1.0"),
        ({"lora_target_modules": ()}, "--lora-target-modules"),
    ],
)
def test_adapters_out_of_range_name_their_flag(options, message):
    with pytest.raises(ValueError, match=message):
        PeftConfig(peft="lora", **options)


def test_experts_are_all_meant_or_none_and_take_lora_alone():
    moe = MoEConfig(num_experts=4, moe_ffn_hidden_size=8)
    some = PeftConfig(peft="lora", lora_target_modules=("experts.2",))
    with pytest.raises(ValueError, match=r"matches some experts of blocks\.0\.moe\.experts"):
        attach_adapters(gpt(moe=moe), some, streams=streams())
    all_of_them = PeftConfig(peft="dora", lora_target_modules=("experts",))
    with pytest.raises(ValueError, match="--peft dora does not support routed experts"):
        attach_adapters(gpt(moe=moe), all_of_them, streams=streams())
    with pytest.raises(ValueError, match="--peft none does not add adapters"):
        attach_adapters(gpt(), PeftConfig(), streams=streams())
    model = gpt(moe=moe)
    attach_adapters(
        model, PeftConfig(peft="lora", lora_target_modules=("experts",)), streams=streams()
    )
    with pytest.raises(ValueError, match="merge the checkpoint by mcore-ckpt"):
        merge_adapters(model)


def test_a_frozen_linear_keeps_nothing_of_its_input():
    kept = []
    linear = ColumnParallelLinear(4, 6, axis=SINGLE).requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.shape) or t, lambda t: t
    ):
        linear(x).sum().backward()
    assert kept == [linear.weight.shape]
