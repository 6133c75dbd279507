"""The model's options: defaults, derivations, and errors that say what to change."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_models.config import (
    RecomputeConfig,
    TransformerConfig,
    activation,
    config_from_dict,
    config_to_dict,
    divisors,
    rotary_size,
    window,
)
from mcore_models.logical_tensors import (
    ffn_size,
    has_qkv_bias,
    head_dim,
    is_gated,
    num_kv_heads,
)


def config(**changes):
    base = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
    return TransformerConfig(**(base | changes))


def test_the_founding_program_needs_three_numbers_only():
    fields = dataclasses.fields(TransformerConfig)
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    assert required == {"num_layers", "hidden_size", "num_attention_heads"}
    made = TransformerConfig(num_layers=12, hidden_size=768, num_attention_heads=12)
    assert (head_dim(made), num_kv_heads(made), ffn_size(made)) == (64, 12, 2048)
    assert (made.position_embedding_type, made.normalization) == ("rope", "RMSNorm")
    assert activation(made) == "silu"
    assert is_gated(made)
    assert not has_qkv_bias(made)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, 2048),
        ({"hidden_size": 4096, "num_attention_heads": 32}, 10880),
        ({"swiglu": False}, 3072),
        ({"swiglu": False, "quick_geglu": True}, 2048),
        ({"ffn_hidden_size": 5}, 5),
        ({"hidden_size": 24}, 64),
    ],
)
def test_the_feed_forward_width_is_derived_as_in_megatron(changes, wanted):
    assert ffn_size(config(**changes)) == wanted


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"swiglu": False}, "gelu"),
        ({"swiglu": False, "openai_gelu": True}, "gelu_tanh"),
        ({"swiglu": False, "squared_relu": True}, "squared_relu"),
        ({"swiglu": False, "quick_geglu": True}, "quick_gelu"),
    ],
)
def test_switches_choose_the_activation(changes, wanted):
    assert activation(config(**changes)) == wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 0}, "--num-layers 0 must be 1 or more"),
        ({"hidden_size": -1}, "--hidden-size -1 must be 1 or more"),
        ({"num_attention_heads": 7}, "--hidden-size 768 .* --num-attention-heads 7.* 770"),
        ({"num_query_groups": 5}, "--num-query-groups 5.* Use 1, 2, 3, 4, 6 or 12"),
        ({"hidden_dropout": 1.0}, "--hidden-dropout 1.0 must be at least 0 and below 1"),
        ({"attention_dropout": -0.1}, "--attention-dropout -0.1"),
        ({"norm_epsilon": 0.0}, "--norm-epsilon 0.0 must be above 0"),
        ({"rotary_base": -1.0}, "--rotary-base -1.0 must be above 0"),
        ({"max_position_embeddings": -1}, "--max-position-embeddings -1"),
        ({"make_vocab_size_divisible_by": 0}, "--make-vocab-size-divisible-by 0"),
        ({"position_embedding_type": "learned_absolute"}, "needs --max-position-embeddings"),
        (
            {"position_embedding_type": "none", "use_rope_scaling": True},
            "--use-rope-scaling has no effect without --position-embedding-type rope",
        ),
        ({"rotary_percent": 1.5}, "--rotary-percent 1.5 must be above 0 and at most 1"),
        (
            {"rotary_percent": 0.02},
            "rotates 1 of the 64 channels of a head: use a share that rotates 2",
        ),
        (
            {"rotary_seq_len_interpolation_factor": 0.0},
            "interpolation-factor 0.0 must be above",
        ),
        (
            {"use_rope_scaling": True, "rope_scaling_low_freq_factor": 5.0},
            "--rope-scaling-low-freq-factor 5.0 must be above 0 and at most",
        ),
        ({"rope_type": "yarn", "rotary_scaling_factor": 0.0}, "--rotary-scaling-factor 0.0"),
        ({"rope_type": "yarn", "beta_fast": 0.5}, "--beta-fast 0.5 must be --beta-slow 1.0"),
        ({"rope_type": "yarn", "use_rope_scaling": True}, "--rope-type yarn excludes"),
        (
            {"position_embedding_type": "none", "rope_type": "yarn"},
            "--rope-type yarn has no effect without --position-embedding-type rope",
        ),
        ({"squared_relu": True}, "--swiglu and --squared-relu exclude each other.*--no-swiglu"),
        (
            {"swiglu": False, "squared_relu": True, "openai_gelu": True},
            "--squared-relu and --openai-gelu exclude each other",
        ),
        ({"window_size": (8, 1)}, "--window-size 8 1"),
        ({"window_size": (-2, 0)}, "--window-size -2 0"),
        ({"window_attn_skip_freq": "2"}, "no effect without --window-size"),
        (
            {"qk_layernorm": True, "qk_norm_width": "layer", "qk_norm_after_rope": True},
            "--qk-norm-after-rope norms each head",
        ),
        (
            {"window_size": (8, 0), "global_kv_channels": 32},
            "--global-kv-channels 32 needs --rotary-base-local",
        ),
        (
            {"window_size": (8, 0), "global_num_query_groups": 5},
            "--num-attention-heads 12 cannot share --global-num-query-groups 5",
        ),
        (
            {"window_size": (8, 0), "window_attn_skip_freq": "12", "num_kv_shared_layers": 1},
            "--num-kv-shared-layers 1 of --num-layers 12: a sharing layer with a window needs",
        ),
        ({"altup_num_inputs": 4}, "--altup-num-inputs 4 .* --per-layer-embedding-size"),
        ({"laurel_rank": 4}, "--laurel-rank 4 .* --altup-num-inputs"),
        (
            {"activation_sparsity_pattern": (0.5, 0.0)},
            "--activation-sparsity-pattern 0.5 0.0 must hold one share for each of --num-lay",
        ),
        ({"activation_sparsity_pattern": (1.0,) * 12}, "must be at least 0 and below 1"),
        (
            {"multi_latent_attention": True, "q_lora_rank": 8, "dsa_indexer_topk": 4}
            | {"dsa_indexer_head_dim": 32},
            "--dsa-indexer-head-dim 32 must be --qk-pos-emb-head-dim, 64, or more",
        ),
    ],
)
def test_bad_options_are_answered_with_what_to_change(changes, words):
    with pytest.raises(ValueError, match=words):
        config(**changes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recompute_num_layers": 2}, "no effect without --recompute-granularity full"),
        (
            {"recompute_granularity": "selective", "recompute_method": "block"},
            "no effect without --recompute-granularity full",
        ),
        ({"recompute_modules": ("mlp",)}, "no effect without --recompute-granularity sel"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("attn",)},
            "--recompute-modules attn: unknown module. Use core_attn, layernorm, mla_up_proj,",
        ),
        ({"distribute_saved_activations": True}, "no effect without --recompute-granularity f"),
        ({"recompute_granularity": "full", "recompute_num_layers": 0}, "must be 1 or more"),
    ],
)
def test_recomputing_refuses_options_without_effect(options, words):
    with pytest.raises(ValueError, match=words):
        RecomputeConfig(**options)


def test_every_nth_layer_may_ignore_the_window():
    made = config(window_size=(128, 0), window_attn_skip_freq="3")
    assert [window(made, layer) for layer in range(6)] == [128, 128, -1, 128, 128, -1]
    assert window(config(window_size=(7, 0)), 5) == 7
    assert window(config(), 0) == -1


def test_part_of_a_head_may_be_rotated():
    assert rotary_size(config(rotary_percent=0.5)) == 32
    assert rotary_size(config(kv_channels=80, rotary_percent=0.25)) == 20


@given(st.integers(1, 500))
def test_divisors_are_all_that_divide(number):
    found = divisors(number)
    assert found == sorted(found)
    assert set(found) == {n for n in range(1, number + 1) if number % n == 0}


@pytest.mark.parametrize(
    "made",
    [
        config(window_size=(8, 0), num_query_groups=4),
        RecomputeConfig(
            recompute_granularity="selective", recompute_modules=("mlp", "layernorm")
        ),
    ],
)
def test_a_config_survives_becoming_json(made):
    import json

    table = json.loads(json.dumps(config_to_dict(made)))
    assert config_from_dict(type(made), table) == made


def test_an_unknown_field_is_answered_with_the_nearest_one():
    with pytest.raises(ValueError, match="no field num_layer: did you mean num_layers"):
        config_from_dict(TransformerConfig, {"num_layer": 3})
