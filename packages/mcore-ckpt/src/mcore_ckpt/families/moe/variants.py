"""Families with experts that differ from another family in a few fields."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import (
    ATTENTION_BIAS,
    OWN_HEADS,
    Description,
    FieldRule,
    Theirs,
    gated_rules,
    pair,
)
from mcore_ckpt.families.common.fields import (
    PLAIN_ROUTING,
    Fields,
    described_expert_size,
    expert_layers,
    expert_setting,
    require_experts,
    require_routing,
    sparse_and_dense,
)
from mcore_ckpt.families.common.layer_types import FULL, LOCAL, UPPER_WINDOWS, windows
from mcore_ckpt.families.moe import deepseek_v3, glm4_moe, qwen3_moe
from mcore_ckpt.mapping.rules import Rule, Table

_SHARED = PLAIN_ROUTING | {"moe_shared_expert_gate": True}


def _dots_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    first = config.get("max_window_layers", 62)
    layers = range(config.get("num_hidden_layers", 62))
    types = [LOCAL if layer >= first else FULL for layer in layers]
    return {**config, "layer_types": config.get("layer_types") or types}


def _read_olmoe(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    usual = {
        "num_experts": fields.take("num_experts"),
        "num_experts_per_tok": fields.take("num_experts_per_tok"),
        "moe_intermediate_size": ours["ffn_hidden_size"],
        "norm_topk_prob": fields.take("norm_topk_prob", False),
        "router_aux_loss_coef": fields.take("router_aux_loss_coef", 0.0),
    }
    return qwen3_moe.read_experts(Fields(usual), ours)


def _write_olmoe(description: Description, theirs: Theirs) -> Theirs:
    require_experts(description)
    if 0 in expert_layers(description):
        raise ValueError("it cannot express --moe-layer-freq: every layer has experts")
    fields = qwen3_moe.write_experts(description, theirs)
    names = ("num_experts", "num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef")
    olmoe_fields = {name: fields[name] for name in names}
    return olmoe_fields | {"intermediate_size": described_expert_size(description)}


def _read_qwen2(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    return qwen3_moe.read_experts(fields, ours) | {
        "moe_shared_expert_intermediate_size": fields.take("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


def _write_qwen2(description: Description, theirs: Theirs) -> Theirs:
    shared = expert_setting(description, "moe_shared_expert_intermediate_size")
    if not shared or not expert_setting(description, "num_experts"):
        raise ValueError("it cannot express a model without routed and shared experts")
    require_routing(description, _SHARED)
    fields = qwen3_moe.write_experts(description, theirs)
    return fields | {"shared_expert_intermediate_size": shared}


def _qwen2_table(description: Description) -> Table:
    sparse, _ = sparse_and_dense(description)
    gate = "mlp.shared_expert_gate.weight"
    shared = [
        *gated_rules("moe.shared.", "mlp.shared_expert.", sparse),
        Rule("blocks.*.moe.shared.token_gate.weight", f"model.layers.*.{gate}", layers=sparse),
    ]
    return qwen3_moe.table(description, shared)


_ALL = (
    replace(deepseek_v3.FAMILY, model_type="kimi_k2"),
    replace(
        glm4_moe.FAMILY,
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        fixed={"qk_layernorm": True},
        absent={
            "num_key_value_heads": 32,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
        },
        parts=(ATTENTION_BIAS, windows(0)),
        partial=0.0,
        unread=("max_window_layers",),
        normalize=_dots_windows,
        as_stored=None,
    ),
    replace(
        qwen3_moe.FAMILY,
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        fixed={"qk_layernorm": True, "qk_norm_width": "layer"},
        absent={
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-5,
            "router_aux_loss_coef": 0.01,
        },
        refused={"clip_qkv": None},
        parts=(ATTENTION_BIAS, OWN_HEADS),
        experts=FieldRule(read=_read_olmoe, write=_write_olmoe),
    ),
    replace(
        qwen3_moe.FAMILY,
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        fixed={},
        absent={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "router_aux_loss_coef": 0.001,
        },
        parts=(pair("add_qkv_bias", "qkv_bias", True), UPPER_WINDOWS),
        experts=FieldRule(read=_read_qwen2, write=_write_qwen2),
        weights=_qwen2_table,
    ),
)

FAMILIES = {family.model_type: family for family in _ALL}
"""Families by ``model_type``."""
