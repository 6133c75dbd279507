"""Granite 4: Mamba-2 or attention without positions, then experts and a shared expert."""

from typing import Any

from mcore_ckpt.families.common.decoder import (
    ATTENTION_BIAS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
)
from mcore_ckpt.families.common.fields import (
    Fields,
    described_expert_size,
    expert_setting,
    require_routing,
    setting,
)
from mcore_ckpt.families.dense.granite import PLAIN_FACTORS
from mcore_ckpt.families.moe.granitemoe import ROUTING, half_rules
from mcore_ckpt.families.recurrent.mamba_parts import MAMBA, SQUARE_HEADS, hybrid_table
from mcore_ckpt.mapping.rules import Table
from mcore_models.layer_patterns import pattern_layers

_WORDS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}


def _read_positions(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    is_rotated = fields.maybe("position_embedding_type") == "rope"
    return {} if is_rotated else {"position_embedding_type": "none"}


def _write_positions(description: Description, _: Theirs) -> Theirs:
    kind = setting(description, "position_embedding_type")
    if kind not in ("rope", "none"):
        raise ValueError(f"it cannot express --position-embedding-type {kind}")
    return {"position_embedding_type": "rope" if kind == "rope" else None}


def _read_experts(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    """Read experts and the layer pattern, which has dense MLPs if there are no experts."""
    kinds = fields.maybe("layer_types")
    kinds = kinds or fields.maybe("layers_block_type") or ["mamba"] * ours["num_layers"]
    fields.maybe("layers_block_type")
    moe = {
        "num_experts": fields.take("num_local_experts", 8),
        "moe_router_topk": fields.take("num_experts_per_tok", 2),
        "moe_ffn_hidden_size": ours["ffn_hidden_size"],
        "moe_shared_expert_intermediate_size": fields.take("shared_intermediate_size", 1024),
        "moe_aux_loss_coeff": fields.take("router_aux_loss_coef", 0.001),
    }
    half = "E" if moe["num_experts"] else "-"
    layers = (f"[{_WORDS[kind]}{half}]" for kind in kinds)
    ours["hybrid_override_pattern"] = "".join(layers)
    if moe["num_experts"]:
        return moe
    ours["ffn_hidden_size"] = moe["moe_shared_expert_intermediate_size"]
    return {}


def _write_experts(description: Description, theirs: Theirs) -> Theirs:
    layers = pattern_layers(setting(description, "hybrid_override_pattern"))
    if len({layer[1] for layer in layers}) > 1:
        raise ValueError("it cannot express experts in some layers and none in others")
    require_routing(description, ROUTING)
    experts = expert_setting(description, "num_experts")
    shared = expert_setting(description, "moe_shared_expert_intermediate_size")
    if experts and not shared:
        raise ValueError(
            "it cannot express experts without --moe-shared-expert-intermediate-size"
        )
    width = theirs["intermediate_size"]
    words = {letter: word for word, letter in reversed(_WORDS.items())}
    return {
        "layer_types": [words[layer[0]] for layer in layers],
        "intermediate_size": described_expert_size(description) if experts else width,
        "num_local_experts": experts,
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "router_aux_loss_coef": expert_setting(description, "moe_aux_loss_coeff"),
        "shared_intermediate_size": shared if experts else width,
    }


def _table(description: Description) -> Table:
    norms = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
    return hybrid_table(description, norms, half_rules(description))


_POSITIONS = FieldRule(
    says=("position_embedding_type",), read=_read_positions, write=_write_positions
)

FAMILY = Decoder(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    absent={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "intermediate_size": 11008},
    parts=(_POSITIONS, PLAIN_FACTORS, SQUARE_HEADS, MAMBA, ATTENTION_BIAS),
    experts=FieldRule(keep=("layer_types",), read=_read_experts, write=_write_experts),
    layers=("ME", "*E", "M-", "*-"),
    weights=_table,
)
