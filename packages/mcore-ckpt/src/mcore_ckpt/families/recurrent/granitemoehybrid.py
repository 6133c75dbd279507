"""Granite 4: Mamba-2 or attention without positions, then experts and a shared layer."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import read_rms_silu, write_rms_silu
from mcore_ckpt.families.common.defaults import HYBRID
from mcore_ckpt.families.common.experts import expert_setting, require_routing
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.recurrent.bamba import (
    hybrid_table,
    read_mamba,
    write_mamba,
)
from mcore_ckpt.families.recurrent.mamba2 import layers_of
from mcore_ckpt.mapping.rules import Rule, Table

_ABSENT: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "intermediate_size": 11008,
}
_WORDS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}
_FACTORS = {
    "softmax_scale": "attention_multiplier",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
}
_ROUTING: dict[str, Any] = {
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": 0.0,
    "moe_router_num_groups": 0,
    "moe_router_enable_expert_bias": False,
    "moe_router_bias": False,
    "moe_apply_probs_on_input": False,
    "moe_shared_expert_gate": False,
    "moe_latent_size": 0,
    "moe_expert_capacity_factor": 0.0,
    "moe_input_jitter_eps": 0.0,
}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, keep=("layer_types",), absent=_ABSENT)
    ours = read_rms_silu(fields) | read_mamba(fields, config["hidden_size"])
    ours |= {mine: float(fields.take(there, 1.0)) for mine, there in _FACTORS.items()}
    ours["logits_multiplier"] = 1.0 / fields.take("logits_scaling", 1.0)
    ours["add_attention_bias"] = fields.take("attention_bias", False)
    if fields.maybe("position_embedding_type") != "rope":
        ours["position_embedding_type"] = "none"
    count = ours["num_layers"]
    kinds = fields.maybe("layer_types") or fields.maybe("layers_block_type")
    fields.maybe("layers_block_type")
    letters = [_WORDS[kind] for kind in kinds or ["mamba"] * count]
    experts, shared = (
        fields.take("num_local_experts", 8),
        fields.take("shared_intermediate_size", 1024),
    )
    chosen = fields.take("num_experts_per_tok", 2)
    coefficient = fields.take("router_aux_loss_coef", 0.001)
    moe: dict[str, Any] = {}
    if experts:
        moe = {
            "num_experts": experts,
            "moe_router_topk": chosen,
            "moe_ffn_hidden_size": ours["ffn_hidden_size"],
            "moe_shared_expert_intermediate_size": shared,
            "moe_aux_loss_coeff": coefficient,
        }
    else:
        ours["ffn_hidden_size"] = shared
    half = "E" if experts else "-"
    ours["hybrid_override_pattern"] = "".join(f"[{letter}{half}]" for letter in letters)
    return fields.described(ours, moe)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    layers = layers_of(description, "ME", "*E", "M-", "*-")
    experts = expert_setting(description, "num_experts")
    if len({layer[1] for layer in layers}) > 1:
        raise ValueError("it cannot say experts in some layers and none in others")
    require_routing(description, _ROUTING)
    require(description, qk_layernorm=False, add_bias_linear=False, add_qkv_bias=False)
    require(description, window_size=(-1, 0))
    kind = setting(description, "position_embedding_type")
    if kind not in ("rope", "none"):
        raise ValueError(f"it cannot say --position-embedding-type {kind}")
    rotated = {**description["config"], "position_embedding_type": "rope"}
    says = (*HYBRID, *_FACTORS, "logits_multiplier", "add_attention_bias")
    theirs = write_rms_silu(
        {**description, "config": rotated}, "GraniteMoeHybridForCausalLM", says=says
    )
    own = theirs.pop("head_dim")
    if own * theirs["num_attention_heads"] != theirs["hidden_size"]:
        raise ValueError("it cannot say --kv-channels")
    shared = expert_setting(description, "moe_shared_expert_intermediate_size")
    if experts and not shared:
        raise ValueError("it cannot say experts without --moe-shared-expert-intermediate-size")
    width = theirs["intermediate_size"]
    if experts:
        theirs["intermediate_size"] = (
            expert_setting(description, "moe_ffn_hidden_size") or width
        )
    words = {letter: word for word, letter in reversed(_WORDS.items())}
    return theirs | {
        "model_type": "granitemoehybrid",
        **write_mamba(description),
        **{there: setting(description, mine) for mine, there in _FACTORS.items()},
        "attention_multiplier": setting(description, "softmax_scale") or own**-0.5,
        "logits_scaling": round(1.0 / setting(description, "logits_multiplier"), 12),
        "attention_bias": setting(description, "add_attention_bias"),
        "position_embedding_type": "rope" if kind == "rope" else None,
        "layer_types": [words[layer[0]] for layer in layers],
        "num_local_experts": experts,
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "router_aux_loss_coef": expert_setting(description, "moe_aux_loss_coeff"),
        "shared_intermediate_size": shared if experts else width,
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights; a gate and its up-projection are one matrix, experts one stack."""
    experts = expert_setting(description, "num_experts")
    there = "model.layers.*."
    ours = "blocks.*.moe.shared." if experts else "blocks.*.mlp."
    shared = tuple(f"{ours}fc1.{part}.weight" for part in ("gate", "up"))
    halves = [
        Rule(shared, f"{there}shared_mlp.input_linear.weight"),
        Rule(f"{ours}fc2.weight", f"{there}shared_mlp.output_linear.weight"),
    ]
    if experts:
        moe, one = f"{there}block_sparse_moe.", "blocks.*.moe.experts.*."
        both = tuple(f"{one}fc1.{part}.weight" for part in ("gate", "up"))
        halves += [
            Rule("blocks.*.moe.router.weight", f"{moe}router.layer.weight"),
            Rule(both, f"{moe}input_linear.weight[*]"),
            Rule(f"{one}fc2.weight", f"{moe}output_linear.weight[*]"),
        ]
    norms = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
    return hybrid_table(description, norms, halves, num_experts=experts)
