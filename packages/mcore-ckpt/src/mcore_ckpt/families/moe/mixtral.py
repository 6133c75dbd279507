"""Mixtral: Mistral with experts in every layer."""

from collections.abc import Collection
from typing import Any

from mcore_ckpt.families.common.decoder import (
    Decoder,
    Description,
    FieldRule,
    Theirs,
    decoder_table,
    gated_rules,
)
from mcore_ckpt.families.common.fields import (
    Fields,
    described_expert_size,
    expert_layers,
    expert_setting,
    require_experts,
)
from mcore_ckpt.families.common.layer_types import WINDOW
from mcore_ckpt.mapping.rules import Rule, Table


def read_experts(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    """Return our fields for the experts, which all layers have."""
    return {
        "num_experts": fields.take("num_local_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": ours["ffn_hidden_size"],
        "moe_aux_loss_coeff": fields.take("router_aux_loss_coef", 0.0),
        "moe_input_jitter_eps": fields.take("router_jitter_noise", 0.0),
    }


def write_experts(description: Description, _: Theirs) -> Theirs:
    """Return their fields; ValueError for layers without experts and for other routing."""
    require_experts(description)
    if expert_setting(description, "moe_router_pre_softmax"):
        raise ValueError("it cannot express --moe-router-pre-softmax")
    if 0 in expert_layers(description):
        raise ValueError("it cannot express --moe-layer-freq: every layer has experts")
    return {
        "intermediate_size": described_expert_size(description),
        "num_local_experts": expert_setting(description, "num_experts"),
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "router_aux_loss_coef": expert_setting(description, "moe_aux_loss_coeff"),
        "router_jitter_noise": expert_setting(description, "moe_input_jitter_eps"),
    }


def _table(description: Description) -> Table:
    moe = "block_sparse_moe."
    rules = [
        Rule("blocks.*.moe.router.weight", f"model.layers.*.{moe}gate.weight"),
        *gated_rules("moe.experts.*.", f"{moe}experts.*.", names=("w1", "w3", "w2")),
    ]
    return decoder_table(description, rules)


def renames(names: Collection[str]) -> dict[str, str]:
    """Return the table's names for a state dict of transformers 5, which has ``mlp``."""
    new_names = {name: name.replace(".mlp.", ".block_sparse_moe.") for name in names}
    return {name: new for name, new in new_names.items() if name != new}


FAMILY = Decoder(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    absent={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.001,
    },
    parts=(WINDOW,),
    experts=FieldRule(read=read_experts, write=write_experts),
    weights=_table,
    renames=renames,
)
