"""Initial weights: spread by their place in the model, equal under every layout."""

import math

import pytest
import torch
from warm_ranks import run_ranks

from mcore_models.building.initialization import initial_std
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_moe.config import MoEConfig
from mcore_parallel import (
    ParallelConfig,
    ParallelContext,
    gather_logical,
    named_shards,
    split_layers,
)

CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=36,
    add_bias_linear=True,
    qk_layernorm=True,
    position_embedding_type="learned_absolute",
    max_position_embeddings=16,
    embedding_init_method_std=0.5,
    make_vocab_size_divisible_by=8,
)
EXPERTS = MoEConfig(num_experts=4, moe_layer_freq="2", moe_shared_expert_intermediate_size=8)
LAYOUTS = [
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2},
    {"context_parallel_size": 2},
]


def test_each_kind_of_matrix_has_its_spread():
    std, residual = CONFIG.init_method_std, CONFIG.init_method_std / math.sqrt(2 * 2)
    wanted = {
        "embedding.weight": 0.5,
        "position_embedding.weight": 0.5,
        "blocks.0.attention.qkv.k.weight": std,
        "blocks.0.attention.proj.weight": residual,
        "blocks.1.mlp.fc1.gate.weight": std,
        "blocks.1.mlp.fc2.weight": residual,
        "blocks.0.moe.router.weight": std,
        "blocks.0.moe.experts.3.fc1.up.weight": std,
        "blocks.0.moe.experts.3.fc2.weight": residual,
        "blocks.0.moe.shared.fc2.weight": residual,
        "head.weight": std,
    }
    assert {name: initial_std(name, CONFIG) for name in wanted} == wanted


def test_weights_follow_their_spread_and_norms_begin_constant():
    wide = TransformerConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        init_method_std=0.006,
        qk_layernorm=True,
        qk_norm_width="own_head",  # gains by head and channel
    )
    model = GPT(wide, ParallelContext.single(), vocab_size=999, dtype=torch.float64)
    for name, shard in named_shards(model).items():
        (piece,) = shard.pieces
        if name.endswith("norm.weight"):
            assert (piece.data == 1).all(), name
        else:
            std = 0.006 / (2 if name.endswith(("proj.weight", "fc2.weight")) else 1)
            assert piece.data.std().item() == pytest.approx(std, rel=0.02), name
            assert abs(piece.data.mean().item()) < std / 50, name
    assert (model.embedding.weight[999:] == 0).all()


def test_mamba_layers_begin_with_the_step_sizes_and_decay_rates_of_the_paper():
    config = TransformerConfig(
        num_layers=2,
        hybrid_override_pattern="MM",
        hidden_size=64,
        num_attention_heads=1,
        mamba_num_heads=4096,
        mamba_head_dim=1,
        mamba_state_dim=2,
        mamba_dt_min=0.01,
        mamba_dt_init_floor=0.02,
    )
    model = GPT(config, ParallelContext.single(), vocab_size=9, dtype=torch.float64)
    mixer = model.blocks["0"].mamba
    rates, steps = mixer.A_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert 1 <= rates.min() < 1.1
    assert 15.9 < rates.max() <= 16
    assert rates.mean().item() == pytest.approx(8.5, rel=0.02)
    assert steps.min().item() == pytest.approx(0.02)
    assert 0.098 < steps.max() <= 0.1
    # The mean of log max(step, 0.02), whose logarithm is uniform from ln 0.01 to ln 0.1.
    assert steps.log().mean().item() == pytest.approx(-3.3495, rel=0.01)
    assert mixer.conv1d.weight.abs().max() <= 0.5
    assert mixer.conv1d.weight.std().item() == pytest.approx(0.5 / math.sqrt(3), rel=0.02)
    assert (mixer.D == 1).all()
    assert mixer.out_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(2), rel=0.02)
    assert not torch.equal(mixer.A_log, model.blocks["1"].mamba.A_log)


def test_another_seed_gives_other_weights():
    one, same, other = (
        GPT(CONFIG, ParallelContext.single(), vocab_size=13, seed=seed) for seed in (1, 1, 2)
    )
    for a, b in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.embedding.weight, other.embedding.weight)


def weights(layouts):
    """Whole logical weights of the model under each layout."""
    found = []
    for degrees in layouts:
        ctx = ParallelContext.build(ParallelConfig(**degrees))
        stage = split_layers(CONFIG.num_layers, ctx.pp.size)[ctx.pp.rank]
        model = GPT(CONFIG, ctx, vocab_size=13, moe=EXPERTS, stage=stage)
        found.append(gather_logical(named_shards(model, ctx.data_axes()), ctx.world))
        ctx.destroy()
    return found


def test_every_layout_begins_with_the_same_bits():
    (alone,) = weights([{}])
    for rank in run_ranks(weights, 2, LAYOUTS):
        for degrees, found in zip(LAYOUTS, rank, strict=True):
            assert found.keys() == alone.keys(), degrees
            for name, tensor in found.items():
                assert torch.equal(tensor, alone[name]), (degrees, name)
