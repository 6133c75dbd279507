"""Granite 3 with experts in every layer; the ``shared`` form adds a dense network to them."""

from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import (
    ATTENTION_BIAS,
    OWN_HEADS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    decoder_table,
)
from mcore_ckpt.families.common.fields import (
    PLAIN_ROUTING,
    Fields,
    described_expert_size,
    expert_layers,
    expert_setting,
    require_routing,
)
from mcore_ckpt.families.dense.granite import PLAIN_FACTORS
from mcore_ckpt.mapping.rules import Rule, Table

ROUTING = PLAIN_ROUTING | {
    "moe_router_pre_softmax": False,
    "moe_shared_expert_gate": False,
    "moe_input_jitter_eps": 0.0,
}
"""Fields of routing with the only values that Granite supports."""
_SHARED = "moe_shared_expert_intermediate_size"


def half_rules(description: Description) -> list[Rule]:
    """Return the rules of the MLP half: gate and up in one matrix, experts stacked."""
    experts, there = expert_setting(description, "num_experts"), "model.layers.*."
    rules = []
    if expert_setting(description, _SHARED) or not experts:
        ours = "blocks.*.moe.shared." if experts else "blocks.*.mlp."
        both = tuple(f"{ours}fc1.{part}.weight" for part in ("gate", "up"))
        rules = [
            Rule(both, f"{there}shared_mlp.input_linear.weight"),
            Rule(f"{ours}fc2.weight", f"{there}shared_mlp.output_linear.weight"),
        ]
    if experts:
        moe, one = f"{there}block_sparse_moe.", "blocks.*.moe.experts.*."
        both = tuple(f"{one}fc1.{part}.weight" for part in ("gate", "up"))
        rules += [
            Rule("blocks.*.moe.router.weight", f"{moe}router.layer.weight"),
            Rule(both, f"{moe}input_linear.weight[*]"),
            Rule(f"{one}fc2.weight", f"{moe}output_linear.weight[*]"),
        ]
    return rules


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": fields.take("num_local_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": ours["ffn_hidden_size"],
        "moe_aux_loss_coeff": fields.take("router_aux_loss_coef"),
    }


def _write(description: Description, _: Theirs) -> Theirs:
    if not expert_setting(description, "num_experts") or 0 in expert_layers(description):
        raise ValueError("it cannot express layers without experts")
    require_routing(description, ROUTING)
    return {
        "intermediate_size": described_expert_size(description),
        "num_local_experts": expert_setting(description, "num_experts"),
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "router_aux_loss_coef": expert_setting(description, "moe_aux_loss_coeff"),
    }


def _write_alone(description: Description, theirs: Theirs) -> Theirs:
    require_routing(description, {_SHARED: 0})
    return _write(description, theirs)


def _read_shared(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    return _read(fields, ours) | {_SHARED: fields.take("shared_intermediate_size", 0)}


def _write_shared(description: Description, theirs: Theirs) -> Theirs:
    shared = {"shared_intermediate_size": expert_setting(description, _SHARED)}
    return _write(description, theirs) | shared


def _table(description: Description) -> Table:
    return decoder_table(description, half_rules(description))


_ALONE = Decoder(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    absent={
        "max_position_embeddings": 2048,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    parts=(PLAIN_FACTORS, ATTENTION_BIAS, OWN_HEADS),
    experts=FieldRule(read=_read, write=_write_alone),
    weights=_table,
)
_BESIDE = replace(
    _ALONE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    experts=FieldRule(read=_read_shared, write=_write_shared),
)

FAMILIES = {family.model_type: family for family in (_ALONE, _BESIDE)}
"""Families by ``model_type``."""
