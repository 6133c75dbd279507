"""Hunyuan, dense and with experts: queries and keys are normed after they are rotated."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import (
    ATTENTION_BIAS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    decoder_table,
    gated_rules,
    mlp_rules,
)
from mcore_ckpt.families.common.fields import (
    PLAIN_ROUTING,
    Fields,
    described_expert_size,
    expert_layers,
    expert_setting,
    require_routing,
    require_value,
)
from mcore_ckpt.mapping.rules import Rule, Table

_ROUTING = PLAIN_ROUTING | {
    "moe_router_pre_softmax": False,
    "moe_shared_expert_gate": False,
    "moe_input_jitter_eps": 0.0,
    "moe_aux_loss_coeff": 0.0,
}


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # "dynamic" with alpha is a larger constant base, by which the slowest channel turns once in
    # alpha contexts ("NTK-aware" scaling).
    rope = dict(config.get("rope_parameters") or {})
    alpha = rope.pop("alpha", None)
    if rope.get("rope_type", rope.get("type")) != "dynamic" or not alpha:
        return config
    heads, hidden = (config.get(name) or 1 for name in ("num_attention_heads", "hidden_size"))
    width = config.get("head_dim") or hidden // heads
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    grown = theta * alpha ** (width / (width - 2))
    return {**config, "rope_parameters": {"rope_type": "default", "rope_theta": grown}}


def _one(fields: Fields, name: str, default: Any = None) -> int:
    """Read a number, or a list that repeats one number for every layer."""
    value = fields.take(name, default)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ValueError(
            f"config.json has {name}={value!r}, which mcore cannot represent here: only one "
            "number for all layers."
        )
    return value[0]


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    width = _one(fields, "moe_intermediate_size", ours["ffn_hidden_size"])
    if width != ours["ffn_hidden_size"]:
        raise ValueError(
            f"config.json has moe_intermediate_size={width}, which transformers ignores: its "
            f"experts have the width intermediate_size={ours['ffn_hidden_size']}."
        )
    if _one(fields, "num_shared_expert", 1) != 1:
        raise ValueError(
            "config.json must have num_shared_expert=1, as transformers has one shared expert."
        )
    return {
        "num_experts": fields.take("num_experts"),
        "moe_router_topk": _one(fields, "moe_topk"),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width,
        "moe_router_dtype": "fp32",
    }


def _write(description: Description, _: Theirs) -> Theirs:
    require_routing(description, _ROUTING)
    count, width = (
        expert_setting(description, "num_experts"),
        described_expert_size(description),
    )
    if not count or 0 in expert_layers(description):
        raise ValueError("it cannot express layers without experts")
    shared = expert_setting(description, "moe_shared_expert_intermediate_size")
    require_value("moe_shared_expert_intermediate_size", shared, width)
    return {
        "intermediate_size": width,
        "num_experts": count,
        "moe_topk": expert_setting(description, "moe_router_topk"),
    }


def _table(description: Description) -> Table:
    """Return the rules of the weights, with Hunyuan's names of query and key norms."""
    mlp = mlp_rules(description)
    if expert_setting(description, "num_experts"):
        mlp = [
            Rule("blocks.*.moe.router.weight", "model.layers.*.mlp.gate.wg.weight"),
            *gated_rules("moe.shared.", "mlp.shared_mlp."),
            *gated_rules("moe.experts.*.", "mlp.experts.*."),
        ]
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    table = decoder_table(description, mlp)
    attention = "model.layers.*.self_attn."
    renamed = {f"{attention}{a}.weight": f"{attention}{b}.weight" for a, b in names.items()}
    return replace(
        table,
        rules=tuple(
            replace(rule, theirs=renamed.get(rule.theirs, rule.theirs)) for rule in table.rules
        ),
    )


_DENSE = Decoder(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    fixed={"qk_layernorm": True, "qk_norm_after_rope": True},
    absent={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    refused={"use_qk_norm": True, "use_cla": False, "mlp_bias": False},
    unread=("eod_token_id", "attention_head_dim", "norm_type"),
    parts=(ATTENTION_BIAS,),
    normalize=_normalize,
    weights=_table,
)

FAMILIES = {
    "hunyuan_v1_dense": _DENSE,
    "hunyuan_v1_moe": replace(
        _DENSE,
        model_type="hunyuan_v1_moe",
        architecture="HunYuanMoEV1ForCausalLM",
        absent={**_DENSE.absent, "num_experts": 1, "moe_topk": 1},
        refused={**_DENSE.refused, "moe_layer_num_skipped": 0, "norm_topk_prob": True},
        unread=(
            *_DENSE.unread,
            "use_mixed_mlp_moe",
            "moe_drop_tokens",
            "moe_random_routing_dropped_token",
        ),
        experts=FieldRule(read=_read, write=_write),
    ),
}
"""Families by ``model_type``."""
