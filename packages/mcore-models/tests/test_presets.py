"""Presets and descriptions of models as data."""

import json
from dataclasses import replace

import pytest

from mcore_models.config import config_to_dict
from mcore_models.description import ModelDescription
from mcore_models.families import FAMILIES, GPT_FAMILY
from mcore_models.flops import num_parameters
from mcore_models.logical_tensors import ffn_size, head_dim, moe_layers, num_kv_heads
from mcore_models.presets import load_preset, preset_names, presets

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK = {
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MINIMAX_LAYERS = ("full_attn", "linear_attn", "mlp")
PUBLISHED = {
    "gemma-3n-e4b": {"model_type": "gemma3n_text", "rms_norm_eps": 1e-6},
    "gemma-3n-e2b": {
        "model_type": "gemma3n_text",
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
        "intermediate_size": [8192] * 30,
        "num_hidden_layers": 30,
        "num_kv_shared_layers": 10,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "vocab_size_per_layer_input": 262144,
    },
    "gemma-2-9b": {
        "model_type": "gemma2",
        "head_dim": 256,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear",
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 1048576,
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "minimax-m1": {
        "model_type": "minimax",
        **{f"{kind}_alpha_factor": 3.5565588200778455 for kind in MINIMAX_LAYERS},
        "head_dim": 128,
        "hidden_size": 6144,
        "intermediate_size": 9216,
        "layer_types": [*["linear_attention"] * 7, "full_attention"] * 10,
        "max_position_embeddings": 10240000,
        "num_attention_heads": 64,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000000,
        "rotary_dim": 64,
        "tie_word_embeddings": False,
        "vocab_size": 200064,
    },
    "olmo-2-7b": {
        "model_type": "olmo2",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "granite-3.0-2b": {
        "model_type": "granite",
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "logits_scaling": 8.0,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
    "granite-3.0-1b-a400m": {
        "model_type": "granitemoe",
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "max_position_embeddings": 4096,
        "num_attention_heads": 16,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
    "ernie-4.5-21b-a3b": {
        "model_type": "ernie4_5_moe",
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "num_attention_heads": 20,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rope_theta": 500000.0,
        "vocab_size": 103424,
    },
    "internlm3-8b": {
        "model_type": "internlm3",
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10240,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
        "rope_theta": 50000000,
        "vocab_size": 128512,
    },
    "pythia-1.4b": {
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    "deepseek-v2-lite": DEEPSEEK
    | {
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "deepseek-v3": DEEPSEEK | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
    "kimi-k2": DEEPSEEK
    | {
        "model_type": "kimi_k2",
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "rope_scaling": YARN | {"beta_fast": 1.0, "factor": 32.0},
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
        "vocab_size": 163840,
    },
}
"""config.json of some published models."""


def test_every_preset_has_the_published_number_of_parameters():
    known = presets()
    assert {"gpt3-175b", "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "tiny"} <= set(known)
    for name in ("llama-3-8b", "llama-3.1-405b", "nemotron-4-340b", "deepseek-v3"):
        assert "arXiv:" in known[name].source, name
    assert all(preset.source for preset in known.values())
    rounded = {
        "ernie-4.5-21b-a3b": 21.8,
        "granite-3.0-1b-a400m": 1.33,
        "granite-3.0-3b-a800m": 3.3,
        "llama-4-scout": 108.6,
        "mamba2-370m": 0.37,
        "mamba2-780m": 0.78,
        "mamba2-1.3b": 1.34,
        "mamba2-hybrid-8b": 8.66,
        "nemotron-h-56b": 56.3,
        "t5-220m": 0.222,
        "gpt-462b": 462,
        "gpt3-1.3b": 1.3,
        "opt-30b": 30,
        "falcon-7b": 6.92,  # 7.22 in its files, which have the tied head once more
        "falcon-40b": 41.3,  # likewise 41.8
        "xlm-roberta-base": 0.278,
        "gpt3-175b": 175,
        "nemotron-4-15b": 15.6,
        "nemotron-4-340b": 341,
        "bamba-9b": 9.78,
        "qwen3-next-80b-a3b": 80,
        "deepseek-v3.2": 672,
        "gemma-3n-e4b": 6.87,
        "gemma-3n-e2b": 4.46,
        "gemma-4-31b": 30.7,
        "gemma-4-e2b": 2.3 + 2.35,  # without the vectors of the layers, and these
        "qwen3.5-27b": 27,
        "qwen3.5-35b-a3b": 35,
        "lfm2-8b-a1b": 8.3,
        "hunyuan-7b": 7.5,
        "minimax-m2": 230,
        "minimax-text-01": 456,
        "kimi-linear-48b-a3b": 49.1,  # 48.4 without embedding and head
        "minimax-m1": 456,
        "glm-4.7-flash": 30,
        "grin-moe": 41.9,
        "modernbert-base": 0.149,
        "modernbert-large": 0.395,
        "apertus-8b": 8.05,
        "apertus-70b": 70.6,
    }
    alike = {"llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b"}
    for name, preset in known.items():
        model = preset.model
        main = replace(model.config, mtp_num_layers=0)
        shapes_of = FAMILIES[model.family].tensor_shapes
        count = num_parameters(main, model.vocab_size, model.moe, shapes_of)
        if name in rounded:
            assert count / 1e9 == pytest.approx(rounded[name], rel=0.02)
        else:
            published = known[alike.get(name, name)].parameters
            assert count == published, f"{name}: give it the published count in models.toml"
        assert preset.source
        table = json.loads(json.dumps(model.to_dict()))
        assert set(table) == {"family", "vocab_size", "config", "moe"}
        assert ModelDescription.from_dict(table) == model


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("deepseek-v3", 684_489_845_504),
        ("glm-4.5-air", 110_468_824_832),
        ("glm-4.5", 358_337_791_296),
    ],
)
def test_published_folders_hold_the_predicting_layer_with_copies_of_both_tables(name, count):
    model = load_preset(name)
    copies = 2 * model.vocab_size * model.config.hidden_size
    assert num_parameters(model.config, model.vocab_size, model.moe) + copies == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_what_its_published_config_says(name):
    """Fields of config.json as released; what is left out is the class's default there."""
    families = pytest.importorskip("mcore_ckpt.families")
    config = PUBLISHED[name]
    description = families.find_family(config["model_type"]).to_ours(config)
    read, preset = ModelDescription.from_dict(description), load_preset(name)
    assert read.vocab_size == preset.vocab_size
    there, mine = (config_to_dict(one.config) for one in (read, preset))
    # Equal settings may be said in two ways, and how weights begin is not compared.
    for one, sizes in ((mine, preset.config), (there, read.config)):
        one["num_query_groups"] = num_kv_heads(sizes)
        one["kv_channels"], one["ffn_hidden_size"] = head_dim(sizes), ffn_size(sizes)
        del one["init_method_std"], one["mtp_loss_scaling_factor"]
    experts = config_to_dict(preset.moe)
    layers = preset.config.num_layers
    assert moe_layers(read.moe, layers) == moe_layers(preset.moe, layers)
    for field, value in description["moe"].items():
        if field not in ("moe_aux_loss_coeff", "moe_layer_freq"):  # trained with; compared
            assert experts[field] == (pytest.approx(value) if value else value), field
    for field, value in mine.items():
        is_number = isinstance(value, float)
        assert there[field] == (pytest.approx(value) if is_number else value), field


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="unknown preset llama-3-8: did you mean llama-3"):
        load_preset("llama-3-8")
    with pytest.raises(ValueError, match=f"use one of {preset_names()[0]}, "):
        load_preset("zzz")


def test_head_widths_that_do_not_follow_are_kept():
    assert head_dim(load_preset("qwen3-30b-a3b").config) == 128
    assert head_dim(load_preset("llama-3.2-1b").config) == 64


def test_a_description_without_experts_is_dense():
    made = load_preset("tiny")
    table = made.to_dict()
    del table["moe"]
    assert ModelDescription.from_dict(table) == made


def test_another_family_and_unknown_fields_are_refused():
    table = load_preset("tiny").to_dict()
    with pytest.raises(ValueError, match="unknown model family 'bart'"):
        ModelDescription.from_dict(table | {"family": "bart"})
    known = {"bart": replace(GPT_FAMILY, name="bart")}
    assert ModelDescription.from_dict(table | {"family": "bart"}, known).family == "bart"
    with pytest.raises(ValueError, match="did you mean num_layers"):
        ModelDescription.from_flags({"num_layer": 2})
