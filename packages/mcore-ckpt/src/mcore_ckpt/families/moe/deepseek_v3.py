"""DeepSeek-V3: latent attention, sigmoid routing in groups, multi-token prediction.

The parts shared with V2 and the experts of GLM-4.5 are here too. Kimi-K2 is a DeepSeek-V3 with
more experts, fewer heads and no groups.
"""

from collections.abc import Iterable
from typing import Any

from mcore_ckpt.families.common.decoder import (
    ANGLES,
    NORMS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    around,
    gated_rules,
    pair,
    tied_copies,
)
from mcore_ckpt.families.common.fields import (
    Fields,
    described_expert_size,
    expert_layers,
    expert_setting,
    require_routing,
    setting,
    sparse_and_dense,
)
from mcore_ckpt.families.moe.mtp_layers import MTP, mtp_copies, mtp_rules, without_absent
from mcore_ckpt.mapping.rules import Rule, Table

_ROUTING = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias": False,
    "moe_apply_probs_on_input": False,
    "moe_shared_expert_gate": False,
}
_SCORED = 2
"""Number of best experts of a group whose scores are summed to the score of the group."""


def _read_latent(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    groups, heads = ours["num_query_groups"], ours["num_attention_heads"]
    if groups != heads:
        raise ValueError(
            f"config.json has num_key_value_heads={groups}, which mcore cannot represent here: "
            f"only {heads}."
        )
    # kv_channels is the width of a query and key: its two parts.
    return {
        "num_query_groups": 0,
        "kv_channels": 0,
        "q_lora_rank": fields.maybe("q_lora_rank") or 0,
    }


def _write_latent(description: Description, theirs: Theirs) -> Theirs:
    del theirs["head_dim"]
    return {"q_lora_rank": setting(description, "q_lora_rank") or None}


LATENT = (
    FieldRule(covers=("multi_latent_attention",), read=_read_latent, write=_write_latent),
    pair("kv_lora_rank", "kv_lora_rank"),
    pair("qk_head_dim", "qk_nope_head_dim"),
    pair("qk_pos_emb_head_dim", "qk_rope_head_dim"),
    pair("v_head_dim", "v_head_dim"),
)
"""Rules of the widths of latent attention."""


def read_experts(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    """Return our fields for routed and shared experts, and for the first dense layers."""
    count, dense = ours["num_layers"], fields.take("first_k_dense_replace", 0)
    if not 0 <= dense <= count:
        raise ValueError(
            f"config.json has first_k_dense_replace={dense}: it must be from 0 to "
            f"num_hidden_layers, {count}."
        )
    width = fields.take("moe_intermediate_size")
    return {
        "num_experts": fields.take("n_routed_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": f"[0]*{dense}+[1]*{count - dense}" if dense else "1",
        "moe_shared_expert_intermediate_size": width * fields.take("n_shared_experts", 0),
        "moe_router_topk_scaling_factor": float(fields.take("routed_scaling_factor", 1.0)),
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": fields.take("aux_loss_alpha", 0.0),
    }


def write_experts(description: Description, group_scores: int) -> Theirs:
    """Return their fields for routed and shared experts, and for the first dense layers.

    Args:
        description: description of the model.
        group_scores: number of best experts whose scores make the score of a group.
    """
    topk, kept, scored, scale = (
        expert_setting(description, f"moe_router_{name}")
        for name in ("topk", "group_topk", "group_score_topk", "topk_scaling_factor")
    )
    if kept and (scored or topk // kept) != group_scores:
        raise ValueError(
            f"it can express groups of experts only with --moe-router-group-score-topk "
            f"{group_scores}"
        )
    count, width = (
        expert_setting(description, "num_experts"),
        described_expert_size(description),
    )
    shared = expert_setting(description, "moe_shared_expert_intermediate_size")
    pattern = expert_layers(description)
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    if not count or shared % width or 0 in pattern[dense:]:
        raise ValueError(
            "it can express experts only if --moe-ffn-hidden-size divides "
            "--moe-shared-expert-intermediate-size, and in all layers after the first dense "
            "ones"
        )
    return {
        "first_k_dense_replace": dense,
        "moe_intermediate_size": width,
        "n_shared_experts": shared // width,
        "n_routed_experts": count,
        "num_experts_per_tok": topk,
        "routed_scaling_factor": scale or 1.0,
        "aux_loss_alpha": expert_setting(description, "moe_aux_loss_coeff"),
    }


def _read_sigmoid(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    moe = read_experts(fields, ours) | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    groups, kept = fields.take("n_group", 1), fields.take("topk_group", 1)
    if not fields.take("norm_topk_prob", True):
        moe["moe_router_norm_topk_prob"] = False
    elif moe["moe_router_topk"] == 1:
        raise ValueError(
            "config.json has num_experts_per_tok=1, whose weight is always 1, which mcore "
            "cannot represent here: only 2 or more."
        )
    if (groups, kept) != (1, 1):
        moe |= {"moe_router_num_groups": groups, "moe_router_group_topk": kept}
        if moe["moe_router_topk"] != _SCORED * kept:
            moe["moe_router_group_score_topk"] = _SCORED
    return moe


def _write_sigmoid(description: Description, _: Theirs) -> Theirs:
    require_routing(description, _ROUTING)
    return write_experts(description, _SCORED) | {
        "n_group": expert_setting(description, "moe_router_num_groups") or 1,
        "topk_group": expert_setting(description, "moe_router_group_topk") or 1,
        "norm_topk_prob": expert_setting(description, "moe_router_norm_topk_prob"),
    }


SIGMOID_EXPERTS = FieldRule(read=_read_sigmoid, write=_write_sigmoid)
"""Experts with sigmoid scores, chosen with a bias and by groups."""


def experts_table(description: Description, attention: Iterable[Rule]) -> Table:
    """Return the rules of a model with routed and shared experts.

    Args:
        description: description of the model.
        attention: rules of a layer's norms and attention.
    """
    sparse, dense = sparse_and_dense(description)
    there = "model.layers.*.mlp.gate."
    router = {"weight": "weight"}
    if expert_setting(description, "moe_router_enable_expert_bias"):
        router["expert_bias"] = "e_score_correction_bias"
    layers = [
        *attention,
        *gated_rules("mlp.", "mlp.", dense),
        *(
            Rule(f"blocks.*.moe.router.{a}", f"{there}{b}", layers=sparse)
            for a, b in router.items()
        ),
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


def latent_rules(description: Description) -> list[Rule]:
    """Return the rules of latent attention."""
    names = {
        "kv_down": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "kv_up": "kv_b_proj",
        "proj": "o_proj",
    }
    if setting(description, "q_lora_rank"):
        names |= {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj"}
    else:
        names["q"] = "q_proj"
    return [
        Rule(f"blocks.*.mla.{ours}.weight", f"model.layers.*.self_attn.{theirs}.weight")
        for ours, theirs in names.items()
    ]


def table(description: Description, extra: Iterable[Rule] = ()) -> Table:
    """Return the rules of a DeepSeek-V2 or V3, with ``extra`` rules for each layer."""
    norms = [
        Rule(f"blocks.*.{ours}.weight", f"model.layers.*.{theirs}.weight")
        for ours, theirs in NORMS.items()
    ]
    return experts_table(description, [*norms, *latent_rules(description), *extra])


FAMILY = Decoder(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fixed={"multi_latent_attention": True, "qk_layernorm": True},
    absent={
        "max_position_embeddings": 4096,
        "n_group": 8,
        "topk_group": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
    },
    only={
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "attention_bias": False,
    },
    refused={"mlp_bias": False, "moe_layer_freq": 1},
    unread=("ep_size", "seq_aux", "qk_head_dim"),
    parts=(*LATENT, pair("rotary_interleaved", "rope_interleave", True), MTP),
    experts=SIGMOID_EXPERTS,
    weights=table,
    as_stored=without_absent,
)
