"""MiniMax-M2: norms of whole queries and keys, sigmoid routing with a bias."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import (
    Decoder,
    Description,
    FieldRule,
    Theirs,
    decoder_table,
    gated_rules,
)
from mcore_ckpt.families.common.fields import PLAIN_ROUTING, Fields, require_routing
from mcore_ckpt.families.moe import mixtral
from mcore_ckpt.mapping.rules import Rule, Table

_ROUTING = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
}


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    # The releases have the number of rotated channels, not their share.
    usual = dict(config)
    rotated, width = usual.pop("rotary_dim", None), config.get("head_dim") or 128
    rope = config.get("rope_parameters") or {}
    if rotated and "partial_rotary_factor" not in rope:
        usual.setdefault("partial_rotary_factor", rotated / width)
    return usual


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    return mixtral.read_experts(fields, ours) | _ROUTING


def _write(description: Description, theirs: Theirs) -> Theirs:
    require_routing(description, {n: v for n, v in _ROUTING.items() if n != "moe_router_dtype"})
    routing = description["moe"] | {name: PLAIN_ROUTING.get(name, "") for name in _ROUTING}
    return mixtral.write_experts({**description, "moe": routing}, theirs)


def _table(description: Description) -> Table:
    moe, there = "block_sparse_moe.", "model.layers.*.block_sparse_moe."
    rules = [
        Rule("blocks.*.moe.router.weight", f"{there}gate.weight"),
        Rule("blocks.*.moe.router.expert_bias", f"{there}e_score_correction_bias"),
        *gated_rules("moe.experts.*.", f"{moe}experts.*.", names=("w1", "w3", "w2")),
    ]
    return replace(
        decoder_table(description, rules), droppable=("*.rotary_emb.inv_freq", "mtp.*")
    )


FAMILY = Decoder(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    fixed={"qk_layernorm": True, "qk_norm_width": "layer"},
    absent={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "router_aux_loss_coef": 0.001,
        "max_position_embeddings": 196608,
    },
    refused={"scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer"},
    experts=FieldRule(read=_read, write=_write),
    partial=1.0,
    theta=5e6,
    normalize=_normalize,
    weights=_table,
)
