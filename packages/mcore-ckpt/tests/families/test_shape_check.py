"""A config.json of other sizes is refused in every family, whatever the names are."""

import json
from math import prod

import pytest

from mcore_ckpt.families import MODEL_TYPES, find_family
from mcore_ckpt.families.common.shapes import (
    check_counts,
    check_shapes,
    expected_shape,
    shapes_of,
)
from mcore_ckpt.formats.megatron.names import to_arguments
from mcore_ckpt.formats.open_checkpoint import description_in
from mcore_ckpt.mapping.rules import expand
from mcore_ckpt.storage.index import TensorEntry

ROPE = {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 37, "intermediate_size": 22}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
HEAD = HEADS | {"head_dim": 10}
LATENT = {
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
}
CONVS = {"layer_types": ["conv", "full_attention"]}
MASKED = {"num_attention_heads": 3, "max_position_embeddings": 19}
MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 4,
}
CONFIGS = {
    "llama": ROPE | HEAD,
    "mistral": ROPE | HEAD,
    "qwen2": ROPE | HEADS,
    "qwen3": ROPE | HEAD,
    "mixtral": ROPE | HEAD | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": ROPE
    | HEAD
    | {"num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 26, "n_positions": 19}
    | {"vocab_size": 37},
    "nemotron": ROPE | HEAD,
    "apertus": ROPE | HEAD,
    "phi3": ROPE | HEADS,
    "olmo2": ROPE | HEADS,
    "olmo3": ROPE | HEADS,
    "granite": ROPE | HEADS,
    "cohere": ROPE | HEADS,
    "cohere2": ROPE | HEAD,
    "starcoder2": ROPE | HEADS,
    "smollm3": ROPE | HEADS,
    "gpt_neox": ROPE | {"num_attention_heads": 3},
    "gpt_oss": ROPE | HEAD | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "glm4_moe": ROPE
    | HEAD
    | {"n_routed_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "llama4_text": ROPE
    | HEAD
    | {"num_local_experts": 3, "intermediate_size_mlp": 16, "interleave_moe_layer_step": 2},
    **dict.fromkeys(("cwm", "ernie4_5", "gemma", "glm", "glm4"), ROPE | HEAD),
    **dict.fromkeys(("arcee", "internlm3", "ministral", "seed_oss"), ROPE | HEAD),
    **dict.fromkeys(("vaultgemma", "hunyuan_v1_dense"), ROPE | HEAD),
    "hunyuan_v1_moe": ROPE | HEAD | {"num_experts": 3, "moe_topk": 2},
    "glm4_moe_lite": ROPE | LATENT | {"q_lora_rank": 9},
    "deepseek_v32": ROPE
    | LATENT
    | {"q_lora_rank": 9, "index_head_dim": 6, "index_n_heads": 3, "index_topk": 5},
    "phimoe": ROPE | HEAD | {"num_local_experts": 3},
    "minimax_m2": ROPE | HEAD | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "ernie4_5_moe": ROPE
    | HEAD
    | {"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 8}
    | {"moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "granitemoe": ROPE | HEADS | {"num_local_experts": 3},
    "granitemoeshared": ROPE | HEADS | {"num_local_experts": 3, "shared_intermediate_size": 10},
    "ministral3": ROPE
    | HEAD
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "exaone4": ROPE | HEADS,
    "helium": ROPE | HEADS | {"head_dim": 4},
    "dots1": ROPE
    | HEAD
    | {"n_routed_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "olmoe": ROPE | HEADS | {"num_experts": 3, "num_experts_per_tok": 2},
    "qwen2_moe": ROPE
    | HEADS
    | {"num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    | {"shared_expert_intermediate_size": 6},
    "gemma2": ROPE | HEAD,
    "gemma3_text": ROPE | HEAD,
    "gemma3n_text": ROPE
    | HEAD
    | {"num_kv_shared_layers": 0, "laurel_rank": 3, "altup_num_inputs": 2}
    | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 31},
    "gemma4_text": ROPE
    | HEAD
    | {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 14}
    | {"hidden_size_per_layer_input": 4},
    "deepseek_v2": ROPE | LATENT | {"q_lora_rank": None},
    "deepseek_v3": ROPE | LATENT | {"q_lora_rank": 9, "num_nextn_predict_layers": 1},
    "kimi_k2": ROPE | LATENT | {"q_lora_rank": 9},
    "mamba2": {"hidden_size": 18, "num_hidden_layers": 2, "vocab_size": 37, "num_heads": 6}
    | {"head_dim": 6, "state_size": 5, "n_groups": 2, "conv_kernel": 4},
    "nemotron_h": {"hidden_size": 18, "vocab_size": 37, "intermediate_size": 22, "head_dim": 10}
    | {"hybrid_override_pattern": "ME*-", "num_attention_heads": 6, "num_key_value_heads": 2}
    | {"mamba_num_heads": 6, "mamba_head_dim": 6, "ssm_state_size": 5, "n_groups": 2}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    | {"moe_shared_expert_intermediate_size": 12},
    "qwen3_next": ROPE
    | HEAD
    | {"num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    | {"shared_expert_intermediate_size": 6, "full_attention_interval": 2}
    | DELTA,
    "qwen3_5_text": ROPE | HEAD | DELTA | {"full_attention_interval": 2},
    "qwen3_5_moe_text": ROPE
    | HEAD
    | DELTA
    | {"num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    | {"shared_expert_intermediate_size": 6, "full_attention_interval": 2},
    "minimax": ROPE | HEAD | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "kimi_linear": ROPE
    | {name: size for name, size in LATENT.items() if name.startswith(("kv_", "qk_", "v_"))}
    | {"num_attention_heads": 4, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_heads": 3, "linear_head_dim": 5, "linear_conv_kernel_dim": 3}
    | {"num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 2}
    | {"moe_intermediate_size": 8},
    "lfm2": ROPE | HEADS | {"conv_L_cache": 4} | CONVS,
    "lfm2_moe": ROPE
    | HEADS
    | CONVS
    | {"conv_L_cache": 4, "num_experts": 3, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 8, "num_dense_layers": 1},
    "bamba": ROPE
    | {"num_attention_heads": 6, "num_key_value_heads": 2}
    | MAMBA
    | {"attn_layer_indices": [1]},
    "granitemoehybrid": ROPE
    | {"num_attention_heads": 6, "num_key_value_heads": 2}
    | MAMBA
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 3}
    | {"num_experts_per_tok": 2, "shared_intermediate_size": 10},
    "t5": {"d_model": 18, "d_kv": 5, "num_heads": 3, "d_ff": 22, "num_layers": 2}
    | {"vocab_size": 37, "relative_attention_num_buckets": 32},
    "bert": ROPE | MASKED | {"type_vocab_size": 3},
    "megatron-bert": ROPE | MASKED | {"type_vocab_size": 3},
    "modernbert": ROPE | MASKED,
    **dict.fromkeys(("roberta", "xlm-roberta"), ROPE | MASKED | {"type_vocab_size": 1}),
    **dict.fromkeys(("nanochat", "olmo", "phi"), ROPE | HEADS),
    "opt": {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 37, "ffn_dim": 22}
    | MASKED,
    "falcon": {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 37}
    | {"ffn_hidden_size": 22, "num_attention_heads": 6, "num_kv_heads": 2}
    | {"new_decoder_architecture": True},
}
COUNTS = {
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_nextn_predict_layers",
} | {
    *("first_k_dense_replace", "interleave_moe_layer_step", "hybrid_override_pattern"),
    *("moe_layer_start_index", "num_dense_layers"),
    *("full_attention_interval", "attn_layer_indices", "layer_types", "mamba_rms_norm"),
    *("mamba_expand", "rope_parameters", "layers_block_type", "num_mem_blocks"),
    *("use_shared_attention_adapter", "new_decoder_architecture"),
}
"""Say which weights there are: the check of names sees them."""

SHAPELESS = {
    ("mixtral", "num_experts_per_tok"),
    ("qwen3_moe", "num_experts_per_tok"),
    ("dots1", "num_experts_per_tok"),
    ("olmoe", "num_experts_per_tok"),
    ("qwen2_moe", "num_experts_per_tok"),
    ("qwen3_next", "num_experts_per_tok"),
    ("qwen3_5_moe_text", "num_experts_per_tok"),
    ("qwen3_5_moe_text", "intermediate_size"),
    ("hunyuan_v1_moe", "moe_topk"),
    ("lfm2", "intermediate_size"),  # both are rounded up to 256
    ("lfm2_moe", "num_experts_per_tok"),
    ("glm4_moe_lite", "num_experts_per_tok"),
    ("minimax_m2", "num_experts_per_tok"),
    ("minimax", "num_experts_per_tok"),
    ("kimi_linear", "num_experts_per_token"),
    ("deepseek_v32", "num_experts_per_tok"),
    ("deepseek_v32", "index_topk"),
    ("qwen3_next", "intermediate_size"),
    ("granitemoehybrid", "num_experts_per_tok"),
    ("gpt_oss", "num_experts_per_tok"),
    ("ernie4_5_moe", "moe_k"),
    ("glm4_moe", "num_experts_per_tok"),
    ("deepseek_v2", "num_experts_per_tok"),
    ("deepseek_v3", "num_experts_per_tok"),
    ("kimi_k2", "num_experts_per_tok"),
    ("nemotron_h", "num_experts_per_tok"),
    ("gemma3n_text", "num_kv_shared_layers"),  # 0, as twice as many
    # All layers have experts.
    ("qwen3_moe", "intermediate_size"),
    ("qwen2_moe", "intermediate_size"),
    # As many heads, so much narrower: the matrices stay as they are.
    ("gpt2", "n_head"),
    *(("modernbert", name) for name in MASKED),  # positions are rotated
    ("gpt_neox", "num_attention_heads"),
    ("bert", "num_attention_heads"),
    ("roberta", "num_attention_heads"),
    ("xlm-roberta", "num_attention_heads"),
    ("opt", "num_attention_heads"),
    ("megatron-bert", "num_attention_heads"),
}
"""Numbers that no weight's shape depends on."""


def described(name, **changes):
    assert name in CONFIGS, f"add {name} to CONFIGS: a small config.json of that family"
    config = {"model_type": name, **CONFIGS[name], **changes}
    return find_family(name).to_ours({k: v for k, v in config.items() if v is not None})


def entries_of(description, name):
    """List a model's weights, each of the shape that its family says."""
    shapes = shapes_of(description)
    links = expand(find_family(name).table(description))
    found = {n: expected_shape(n, shapes) for link in links for n in link.ours}
    assert all(shape is not None and prod(shape) for shape in found.values()), found
    return {n: TensorEntry(shape, "F32", ()) for n, shape in found.items()}


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_each_size_in_a_config_is_held_against_the_weights(name):
    description = described(name)
    entries = entries_of(description, name)
    check_shapes(description, entries)
    sizes = {key for key, value in CONFIGS[name].items() if value is not None} - COUNTS
    for key in sorted(key for key in sizes if (name, key) not in SHAPELESS):
        # Twice, so that what must divide still divides.
        other = described(name, **{key: 2 * CONFIGS[name][key]})
        known = {n: e for n, e in entries.items() if expected_shape(n, shapes_of(other))}
        with pytest.raises(ValueError, match=r"weight shapes do not match config\.json"):
            check_shapes(other, known)


def test_a_kimi_linear_is_written_as_transformers_and_as_engines_read_it():
    family = find_family("kimi_linear")
    dense = described("kimi_linear", mlp_layer_types=["dense", "dense"])
    assert family.to_ours(family.to_theirs(dense)) == dense
    theirs = family.to_theirs(described("kimi_linear"))
    assert theirs["layer_types"] == ["linear_attention", "full_attention"]
    assert theirs["mlp_layer_types"] == ["dense", "sparse"]
    released = {"num_heads": 3, "head_dim": 5, "short_conv_kernel_size": 3}
    released |= {"kda_layers": [1], "full_attn_layers": [2]}
    assert theirs["linear_attn_config"] == released
    assert theirs["first_k_dense_replace"] == 1
    # The default of transformers, 163839, is outside of this vocabulary.
    assert theirs["pad_token_id"] is None


@pytest.mark.parametrize("name", ["minimax", "kimi_linear", "gemma3n_text", "gemma2"])
def test_kinds_of_more_or_fewer_layers_than_a_model_has_are_refused(name):
    for count in (0, 1, 3):
        message = rf"config\.json has {count} layer_types for num_hidden_layers=2"
        with pytest.raises(ValueError, match=message):
            described(name, layer_types=["full_attention"] * count)


def test_fields_that_a_family_derives_others_from_are_named_if_they_are_absent():
    sizes = {"num_heads": 3, "head_dim": 5, "short_conv_kernel_size": 3}
    for name, absent, changes in (
        ("minimax", "hidden_size", {"hidden_size": None, "head_dim": None, "rotary_dim": 4}),
        ("kimi_linear", "num_hidden_layers", {"num_hidden_layers": None}),
        ("kimi_linear", "full_attn_layers", {"linear_attn_config": sizes}),
    ):
        with pytest.raises(ValueError, match=rf"config\.json lacks {absent}"):
            described(name, **changes)
    with pytest.raises(ValueError, match=r"intermediate_size=\[12\]"):
        described("gemma3n_text", intermediate_size=[12])


def test_a_family_of_someone_elses_says_nothing_about_shapes():
    entries = {"embedding.weight": TensorEntry((3, 4), "F32", ())}
    check_shapes({"family": "theirs", "vocab_size": 9, "config": {}}, entries)


@pytest.mark.parametrize(
    ("hidden", "gate", "width"),
    [(1008, "swiglu", 2688), (1008, "quick_geglu", 2688), (1008, "", 4032), (6, "swiglu", 64)],
)
def test_a_width_that_no_one_gave_is_the_one_the_model_derives(hidden, gate, width):
    config = {"num_layers": 1, "hidden_size": hidden, "num_attention_heads": 3}
    config |= {"swiglu": gate == "swiglu", "quick_geglu": gate == "quick_geglu"}
    description = {"family": "gpt", "vocab_size": 9, "config": config}
    weight = TensorEntry((width, hidden), "F32", ())
    check_shapes(description, {f"blocks.0.mlp.fc1{'.gate' if gate else ''}.weight": weight})
    assert to_arguments(description, 9)["ffn_hidden_size"] == width


def test_more_dense_layers_than_there_are_is_said_by_its_own_field():
    with pytest.raises(ValueError, match="first_k_dense_replace=3: it must be from 0 to num_h"):
        described("deepseek_v2", first_k_dense_replace=3)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_groups_of_sigmoid_experts_are_chosen_by_their_two_best(name):
    config = {"n_group": 1, "topk_group": 1, "n_routed_experts": 12, "num_experts_per_tok": 4}
    family = find_family(name)
    assert "moe_router_num_groups" not in described(name, **config)["moe"]
    for kept, scores in ((2, 0), (3, 2)):  # 0: as many as each kept group gives
        description = described(name, **config | {"n_group": 4, "topk_group": kept})
        assert description["moe"].get("moe_router_group_score_topk", 0) == scores
        assert family.to_theirs(description)["topk_group"] == kept
    with pytest.raises(ValueError, match="whose weight is always 1"):
        described(name, **config | {"num_experts_per_tok": 1})
    del description["moe"]["moe_router_topk_scaling_factor"]
    assert family.to_theirs(description)["routed_scaling_factor"] == 1.0


def test_a_config_that_is_given_alone_may_not_count_what_no_model_has(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen2", "num_hidden_layers": 10**12}))
    with pytest.raises(ValueError, match=r"config\.json has num_hidden_layers=1000000000000"):
        description_in(str(path))


@pytest.mark.parametrize(
    "name",
    [
        *("num_layers", "n_layer", "num_hidden_layers", "encoder_num_layers"),
        *("num_local_experts", "n_routed_experts", "moe_num_experts"),
        *("mtp_num_layers", "num_mem_blocks"),
    ],
)
def test_counts_are_bounded_by_tensors_and_by_stacks_of_matrices(name):
    check_counts({name: 3}, [(2,), (4, 4), (5,)], "config.json")
    check_counts({name: 6}, [(2, 6, 4, 4)], "config.json")
    with pytest.raises(ValueError, match=f"{name}=4, but .* 3 tensors, enough for 3 at most"):
        check_counts({name: 4}, [(2,), (9, 4), (5,)], "config.json")
