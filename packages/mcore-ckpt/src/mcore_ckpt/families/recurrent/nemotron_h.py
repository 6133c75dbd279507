"""Nemotron-H: each layer is Mamba-2, attention, a squared-ReLU MLP or experts."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import checked_layers
from mcore_ckpt.families.common.fields import (
    REQUIRED,
    Fields,
    expert_setting,
    read_pairs,
    refuse_variants,
    require,
    require_routing,
    setting,
    settings,
)
from mcore_ckpt.families.recurrent.mamba_parts import (
    HYBRID,
    MAMBA_PAIRS,
    below_backbone,
    mamba_rules,
)
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.layer_patterns import pattern_layers
from mcore_models.logical_tensors import head_dim, mamba_sizes, num_kv_heads

PAIRS = (
    ("hidden_size", "hidden_size", REQUIRED),
    ("num_attention_heads", "num_attention_heads", 32),
    ("num_query_groups", "num_key_value_heads", 8),
    ("kv_channels", "head_dim", 128),
    ("ffn_hidden_size", "intermediate_size", 21504),
    ("attention_dropout", "attention_dropout", 0.0),
    ("mamba_num_heads", "mamba_num_heads", 128),
    ("mamba_head_dim", "mamba_head_dim", 64),
    ("mamba_state_dim", "ssm_state_size", 128),
    ("mamba_chunk_size", "chunk_size", 128),
    ("init_method_std", "initializer_range", 0.02),
    *MAMBA_PAIRS,
)
_EXPERT_PAIRS = (
    ("num_experts", "n_routed_experts", 8),
    ("moe_router_topk", "num_experts_per_tok", 2),
    ("moe_ffn_hidden_size", "moe_intermediate_size", 7688),
    ("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 7688),
    ("moe_router_topk_scaling_factor", "routed_scaling_factor", 1.0),
)
_WORDS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
_FIXED: dict[str, Any] = {
    "position_embedding_type": "none",
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,
    "swiglu": False,
    "squared_relu": True,
}
_ROUTING: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
}
carries = (
    *("max_position_embeddings", "num_logits_to_keep", "use_mamba_kernels", "expand"),
    *("mamba_proj_bias", "mamba_ssm_cache_dtype", "n_shared_experts", "sliding_window"),
    "moe_shared_expert_overlap",
)
"""Fields that transformers' model ignores; inference engines may read them."""
_DROPPED = (
    *("num_hidden_layers", "time_step_limit", "num_nextn_predict_layers"),
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
)
"""Fields that repeat others, or belong to predictors, which transformers' model lacks too."""


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description; see ``families``."""
    fields = Fields(config, keep=("layer_types",))
    for name in ("attention_bias", "mlp_bias"):
        fields.must_be(name, False)
    fields.must_be("mlp_hidden_act", "relu2")
    fields.must_be("mamba_hidden_act", "silu")
    fields.must_be("hidden_dropout", 0.0, 0)
    fields.must_be("norm_topk_prob", True)
    fields.must_be("moe_latent_size")
    kinds = fields.maybe("layers_block_type") or fields.maybe("layer_types")
    pattern = fields.maybe("hybrid_override_pattern") or ""
    if kinds:
        pattern = "".join(_WORDS.get(kind, f"({kind})") for kind in kinds)
    letters = pattern_layers(pattern)
    if not letters:
        raise ValueError("config.json lacks layers_block_type.")
    if not set(letters) <= set("M*-E"):
        raise ValueError(
            f"config.json has layers {pattern}, which mcore cannot represent here."
        )
    ours = read_pairs(fields, PAIRS) | _FIXED
    ours |= {"hybrid_override_pattern": pattern, "num_layers": len(letters)}
    # The only limit of transformers' mixer is the smallest initial step.
    ours["mamba_dt_limit"] = [ours["mamba_dt_min"], 0.0]
    ours["untie_embeddings_and_output_weights"] = not fields.take("tie_word_embeddings", False)
    moe = read_pairs(fields, _EXPERT_PAIRS) | _ROUTING
    groups = fields.take("n_group", 1), fields.take("topk_group", 1)
    if groups != (1, 1):
        moe["moe_router_num_groups"], moe["moe_router_group_topk"] = groups
        moe["moe_router_group_score_topk"] = 2
    for name in (*carries, *_DROPPED):
        fields.maybe(name)
    return fields.described(ours, moe if "E" in letters else {})


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json; see ``families``."""
    config, letters = settings(description), checked_layers(description, *"M*-E")
    refuse_variants(description, *HYBRID)
    require(description, **_FIXED, add_bias_linear=False, add_qkv_bias=False)
    require(description, qk_layernorm=False, window_size=(-1, 0), hidden_dropout=0.0)
    require(description, multi_latent_attention=False)
    limit = setting(description, "mamba_dt_limit")
    if "M" in letters and tuple(limit) != (config.mamba_dt_min, 0.0):
        raise ValueError(
            f"it cannot express --mamba-dt-limit {limit[0]} {limit[1]}: only --mamba-dt-min "
            f"({config.mamba_dt_min}) and 0"
        )
    words = {letter: word for word, letter in reversed(_WORDS.items())}
    return {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "vocab_size": description["vocab_size"],
        **{there: getattr(config, ours) for ours, there, _ in PAIRS},
        "layers_block_type": [words[letter] for letter in letters],
        # Read by inference engines that have their own config class.
        "hybrid_override_pattern": "".join(letters),
        "num_hidden_layers": len(letters),
        "mamba_num_heads": mamba_sizes(config).heads,
        "num_key_value_heads": num_kv_heads(config),
        "head_dim": head_dim(config),
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        **(_write_experts(description) if "E" in letters else {}),
    }


def _write_experts(description: Mapping[str, Any]) -> dict[str, Any]:
    require_routing(description, _ROUTING | {"moe_router_norm_topk_prob": True})
    theirs = {there: expert_setting(description, ours) for ours, there, _ in _EXPERT_PAIRS}
    theirs["routed_scaling_factor"] = theirs["routed_scaling_factor"] or 1.0
    groups = expert_setting(description, "moe_router_num_groups")
    kept = expert_setting(description, "moe_router_group_topk")
    if not all(theirs[name] for name in ("moe_intermediate_size", _EXPERT_PAIRS[3][1])):
        raise ValueError(
            "it cannot express experts without --moe-ffn-hidden-size and "
            "--moe-shared-expert-intermediate-size"
        )
    return {**theirs, "n_group": groups or 1, "topk_group": kept or 1}


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    letters = pattern_layers(setting(description, "hybrid_override_pattern"))
    layers_of = {
        letter: tuple(layer for layer, one in enumerate(letters) if one == letter)
        for letter in "M*-E"
    }
    there = "backbone.layers.*.mixer."
    norms = {"M": "mamba_norm", "*": "attention_norm", "-": "mlp_norm", "E": "mlp_norm"}
    rules = [
        Rule(
            f"blocks.*.{norm}.weight", "backbone.layers.*.norm.weight", layers=layers_of[letter]
        )
        for letter, norm in norms.items()
    ]
    if layers_of["M"]:
        rules += mamba_rules(description, there, layers=layers_of["M"])
    rules += [
        Rule(f"blocks.*.{ours}.weight", f"{there}{theirs}.weight", layers=layers_of[letter])
        for letter, ours, theirs in (
            *(("*", f"attention.qkv.{part}", f"{part}_proj") for part in "qkv"),
            ("*", "attention.proj", "o_proj"),
            ("-", "mlp.fc1", "up_proj"),
            ("-", "mlp.fc2", "down_proj"),
            ("E", "moe.router", "gate"),
            ("E", "moe.shared.fc1", "shared_experts.up_proj"),
            ("E", "moe.shared.fc2", "shared_experts.down_proj"),
            ("E", "moe.experts.*.fc1", "experts.*.up_proj"),
            ("E", "moe.experts.*.fc2", "experts.*.down_proj"),
        )
    ]
    bias = "moe.router.expert_bias"
    rules.append(
        Rule(f"blocks.*.{bias}", f"{there}gate.e_score_correction_bias", layers=layers_of["E"])
    )
    return below_backbone(description, rules, droppable=("mtp.*",))
