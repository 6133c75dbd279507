"""DeepSeek-V3: latent attention, sigmoid routing in groups, multi-token prediction.

What V2 has in common with it is here too.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder_rules import (
    ANGLES,
    around,
    gated_rules,
    tied_copies,
)
from mcore_ckpt.families.common.defaults import ROPE_VARIANTS
from mcore_ckpt.families.common.experts import (
    expert_layers,
    expert_setting,
    sparse_and_dense,
)
from mcore_ckpt.families.common.fields import (
    REQUIRED,
    Fields,
    read_pairs,
    refuse_variants,
    require,
    require_family,
    setting,
)
from mcore_ckpt.families.common.rope import read_rope, write_rope
from mcore_ckpt.families.moe.mtp_layers import MTP, mtp_copies, mtp_rules, without_absent
from mcore_ckpt.mapping.rules import Rule, Table

PAIRS = (
    ("num_layers", "num_hidden_layers", REQUIRED),
    ("hidden_size", "hidden_size", REQUIRED),
    ("num_attention_heads", "num_attention_heads", REQUIRED),
    ("ffn_hidden_size", "intermediate_size", REQUIRED),
    ("max_position_embeddings", "max_position_embeddings", 4096),
    ("norm_epsilon", "rms_norm_eps", 1e-6),
    ("attention_dropout", "attention_dropout", 0.0),
    ("init_method_std", "initializer_range", 0.02),
    ("kv_lora_rank", "kv_lora_rank", REQUIRED),
    ("qk_head_dim", "qk_nope_head_dim", REQUIRED),
    ("qk_pos_emb_head_dim", "qk_rope_head_dim", REQUIRED),
    ("v_head_dim", "v_head_dim", REQUIRED),
)
"""Our fields and theirs, of both versions."""

_ABSENT = {"n_group": 8, "topk_group": 4, "n_shared_experts": 1} | {
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
}
as_stored = without_absent

_SCORED = 2
"""Experts whose scores sum to that of their group."""


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description; see ``families``."""
    fields = Fields(config, absent=_ABSENT)
    fields.must_be("scoring_func", "sigmoid")
    fields.must_be("topk_method", "noaux_tc")
    fields.must_be("norm_topk_prob", True)
    interleaved = fields.take("rope_interleave", True)
    groups = fields.take("n_group", 1), fields.take("topk_group", 1)
    ours, moe = read(fields, interleaved)
    ours |= MTP.read(fields, ours)
    if moe["moe_router_topk"] == 1:
        raise ValueError(
            "config.json has num_experts_per_tok=1, whose weight is then always 1, which mcore "
            "cannot represent here: only 2 or more."
        )
    moe |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    if groups != (1, 1):
        moe["moe_router_num_groups"], moe["moe_router_group_topk"] = groups
        if moe["moe_router_topk"] != _SCORED * groups[1]:
            moe["moe_router_group_score_topk"] = _SCORED
    return fields.described(ours, moe)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json; see ``families``."""
    theirs = write(description, "deepseek_v3", "DeepseekV3ForCausalLM")
    topk, groups, kept, scored, score, bias = (
        expert_setting(description, f"moe_router_{name}")
        for name in (
            *("topk", "num_groups", "group_topk", "group_score_topk", "score_function"),
            "enable_expert_bias",
        )
    )
    if score != "sigmoid" or not bias:
        raise ValueError(
            "it cannot express experts but with --moe-router-score-function sigmoid and "
            "--moe-router-enable-expert-bias"
        )
    if kept and (scored or topk // kept) != _SCORED:
        raise ValueError(
            "it cannot express groups of experts but with --moe-router-group-score-topk "
            f"{_SCORED}"
        )
    return theirs | {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": groups or 1,
        "topk_group": kept or 1,
        "rope_interleave": setting(description, "rotary_interleaved"),
        **MTP.write(description, theirs),
    }


def read(fields: Fields, interleaved: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what both versions say alike: model and experts."""
    for name in ("attention_bias", "mlp_bias"):
        fields.must_be(name, False)
    fields.must_be("hidden_act", "silu")
    fields.must_be("moe_layer_freq", 1)
    for name in ("ep_size", "seq_aux", "head_dim", "qk_head_dim"):
        fields.maybe(name)
    ours = read_pairs(fields, PAIRS)
    fields.must_be("num_key_value_heads", ours["num_attention_heads"])
    rope = read_rope(fields, ours["max_position_embeddings"])
    if rope.pop("rotary_percent") != 1.0:
        raise ValueError("config.json has partial_rotary_factor, which this family lacks.")
    ours |= rope | {
        "multi_latent_attention": True,
        "q_lora_rank": fields.maybe("q_lora_rank") or 0,
        "qk_layernorm": True,
        "rotary_interleaved": interleaved,
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", False),
    }
    dense = fields.take("first_k_dense_replace", 0)
    count = ours["num_layers"]
    if not 0 <= dense <= count:
        raise ValueError(
            f"config.json has first_k_dense_replace={dense}: it must be from 0 to "
            f"num_hidden_layers, {count}."
        )
    width = fields.take("moe_intermediate_size")
    shared = fields.take("n_shared_experts", 0)
    moe = {
        "num_experts": fields.take("n_routed_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": f"[0]*{dense}+[1]*{count - dense}" if dense else "1",
        "moe_shared_expert_intermediate_size": width * shared,
        "moe_router_topk_scaling_factor": float(fields.take("routed_scaling_factor", 1.0)),
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": fields.take("aux_loss_alpha", 0.0),
    }
    return ours, moe


def write(description: Mapping[str, Any], family: str, architecture: str) -> dict[str, Any]:
    """Write what both versions say alike."""
    require_family(description, "gpt")
    refuse_variants(description, *ROPE_VARIANTS, "mtp_num_layers")
    require(
        description,
        multi_latent_attention=True,
        qk_layernorm=True,
        position_embedding_type="rope",
        normalization="RMSNorm",
        apply_layernorm_1p=False,
        swiglu=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
    )
    width = expert_setting(description, "moe_ffn_hidden_size")
    shared = expert_setting(description, "moe_shared_expert_intermediate_size")
    pattern = expert_layers(description)
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    if not width or shared % width or 0 in pattern[dense:]:
        raise ValueError(
            "it cannot express experts but with --moe-ffn-hidden-size that divides "
            "--moe-shared-expert-intermediate-size, in all layers after the first dense ones"
        )
    for name in ("moe_shared_expert_gate", "moe_router_bias", "moe_apply_probs_on_input"):
        if expert_setting(description, name):
            raise ValueError(f"it cannot express --{name.replace('_', '-')}")
    return {
        "model_type": family,
        "architectures": [architecture],
        "vocab_size": description["vocab_size"],
        **{there: setting(description, ours) for ours, there, _ in PAIRS},
        **write_rope(description),
        "num_key_value_heads": setting(description, "num_attention_heads"),
        "q_lora_rank": setting(description, "q_lora_rank") or None,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": not setting(description, "untie_embeddings_and_output_weights"),
        "first_k_dense_replace": dense,
        "moe_intermediate_size": width,
        "n_shared_experts": shared // width,
        "n_routed_experts": expert_setting(description, "num_experts"),
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "routed_scaling_factor": expert_setting(description, "moe_router_topk_scaling_factor"),
        "aux_loss_alpha": expert_setting(description, "moe_aux_loss_coeff"),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights, those of both versions."""
    sparse, dense = sparse_and_dense(description)
    layers = [
        *_attention(description),
        *gated_rules("mlp.", "mlp.", dense),
        *_router(description, sparse),
        *gated_rules("moe.experts.*.", "mlp.experts.*.", sparse),
        *gated_rules("moe.shared.", "mlp.shared_experts.", sparse),
    ]
    return Table(
        (*around(description, layers), *mtp_rules(description, layers)),
        setting(description, "num_layers"),
        expert_setting(description, "num_experts"),
        droppable=ANGLES,
        copies=tied_copies(description) | mtp_copies(description),
    )


def _attention(description: Mapping[str, Any]) -> list[Rule]:
    names = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mla.kv_down": "self_attn.kv_a_proj_with_mqa",
        "mla.kv_norm": "self_attn.kv_a_layernorm",
        "mla.kv_up": "self_attn.kv_b_proj",
        "mla.proj": "self_attn.o_proj",
    }
    if setting(description, "q_lora_rank"):
        names |= {
            "mla.q_down": "self_attn.q_a_proj",
            "mla.q_norm": "self_attn.q_a_layernorm",
            "mla.q_up": "self_attn.q_b_proj",
        }
    else:
        names["mla.q"] = "self_attn.q_proj"
    return [
        Rule(f"blocks.*.{ours}.weight", f"model.layers.*.{theirs}.weight")
        for ours, theirs in names.items()
    ]


def _router(description: Mapping[str, Any], layers: tuple[int, ...]) -> list[Rule]:
    gate = "model.layers.*.mlp.gate."
    rules = [Rule("blocks.*.moe.router.weight", f"{gate}weight", layers=layers)]
    if expert_setting(description, "moe_router_enable_expert_bias"):
        there = f"{gate}e_score_correction_bias"
        rules.append(Rule("blocks.*.moe.router.expert_bias", there, layers=layers))
    return rules
