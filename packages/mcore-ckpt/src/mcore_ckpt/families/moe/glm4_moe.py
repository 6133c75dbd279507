"""GLM-4.5: partly rotated heads, sigmoid routing with a bias, a shared expert."""

from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import Decoder, Description, FieldRule, Theirs, pair
from mcore_ckpt.families.common.decoder_rules import (
    attention_rules,
    decoder_table,
    gated_rules,
)
from mcore_ckpt.families.common.experts import (
    described_expert_size,
    expert_layers,
    expert_setting,
    require_routing,
    sparse_and_dense,
)
from mcore_ckpt.families.common.fields import Fields
from mcore_ckpt.families.moe.mtp_layers import MTP, mtp_copies, mtp_rules, without_absent
from mcore_ckpt.mapping.rules import Rule, Table

_ROUTING = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias": False,
    "moe_apply_probs_on_input": False,
    "moe_shared_expert_gate": False,
}


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    count, dense = ours["num_layers"], fields.take("first_k_dense_replace")
    groups, kept = fields.take("n_group"), fields.take("topk_group")
    width = fields.take("moe_intermediate_size")
    return {
        "num_experts": fields.take("n_routed_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": f"[0]*{dense}+[1]*{count - dense}" if dense else "1",
        "moe_shared_expert_intermediate_size": width * fields.take("n_shared_experts"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": groups if groups > 1 else 0,
        "moe_router_group_topk": kept if groups > 1 else 0,
        "moe_router_topk_scaling_factor": float(fields.take("routed_scaling_factor", 1.0)),
    }


def _write(description: Description, _: Theirs) -> Theirs:
    require_routing(description, _ROUTING)
    pattern = expert_layers(description)
    dense = pattern.count(0)
    if any(pattern[:dense]):
        raise ValueError("it cannot express --moe-layer-freq: dense layers come first")
    width = described_expert_size(description)
    shared = expert_setting(description, "moe_shared_expert_intermediate_size")
    scale = expert_setting(description, "moe_router_topk_scaling_factor")
    return {
        "first_k_dense_replace": dense,
        "moe_intermediate_size": width,
        "n_shared_experts": shared // width,
        "n_routed_experts": expert_setting(description, "num_experts"),
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "n_group": expert_setting(description, "moe_router_num_groups") or 1,
        "topk_group": expert_setting(description, "moe_router_group_topk") or 1,
        "routed_scaling_factor": scale or 1.0,
    }


def _table(description: Description) -> Table:
    sparse, dense = sparse_and_dense(description)
    gate, router = "model.layers.*.mlp.gate.", "blocks.*.moe.router."
    halves = [
        *gated_rules("mlp.", "mlp.", dense),
        Rule(f"{router}weight", f"{gate}weight", layers=sparse),
        Rule(f"{router}expert_bias", f"{gate}e_score_correction_bias", layers=sparse),
        *gated_rules("moe.experts.*.", "mlp.experts.*.", sparse),
        *gated_rules("moe.shared.", "mlp.shared_experts.", sparse),
    ]
    layer = [*attention_rules(description), *halves]
    table = decoder_table(description, halves, extra=mtp_rules(description, layer))
    return replace(table, copies={**table.copies, **mtp_copies(description)})


FAMILY = Decoder(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    absent={
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
    },
    only={"norm_topk_prob": True},
    parts=(
        MTP,
        pair("qk_layernorm", "use_qk_norm", False),
        pair("add_qkv_bias", "attention_bias", False),
    ),
    experts=FieldRule(read=_read, write=_write),
    partial=0.5,
    weights=_table,
    as_stored=without_absent,
)
