"""Mixtral: Mistral with experts in every layer."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import decoder_table, read_rms_silu, write_rms_silu
from mcore_ckpt.families.common.experts import (
    expert_layers,
    expert_rules,
    expert_setting,
    require_experts,
)
from mcore_ckpt.families.common.fields import Fields, require
from mcore_ckpt.families.dense.mistral import read_window, write_window
from mcore_ckpt.mapping.rules import Rule, Table

_ABSENT = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6} | {
    "router_aux_loss_coef": 0.001
}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, absent=_ABSENT)
    ours = read_rms_silu(fields) | {"window_size": read_window(fields)}
    moe = {
        "num_experts": fields.take("num_local_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": ours["ffn_hidden_size"],
        "moe_aux_loss_coeff": fields.take("router_aux_loss_coef", 0.0),
        "moe_input_jitter_eps": fields.take("router_jitter_noise", 0.0),
    }
    return fields.described(ours, moe)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    require_experts(description)
    require(description, qk_layernorm=False, add_bias_linear=False, add_qkv_bias=False)
    if expert_setting(description, "moe_router_pre_softmax"):
        raise ValueError("it cannot say --moe-router-pre-softmax")
    if 0 in expert_layers(description):
        raise ValueError("it cannot say --moe-layer-freq: every layer has experts")
    theirs = {"model_type": "mixtral", **write_rms_silu(description, "MixtralForCausalLM")}
    width = expert_setting(description, "moe_ffn_hidden_size") or theirs["intermediate_size"]
    return theirs | {
        "intermediate_size": width,
        **write_window(description),
        "num_local_experts": expert_setting(description, "num_experts"),
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "router_aux_loss_coef": expert_setting(description, "moe_aux_loss_coeff"),
        "router_jitter_noise": expert_setting(description, "moe_input_jitter_eps"),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    mlp = "model.layers.*.block_sparse_moe."
    rules = [
        Rule("blocks.*.moe.router.weight", f"{mlp}gate.weight"),
        *expert_rules(f"{mlp}experts.*.", ("w1", "w3", "w2")),
    ]
    num_experts = expert_setting(description, "num_experts")
    return decoder_table(description, rules, num_experts=num_experts)
