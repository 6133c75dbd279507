"""Bamba: each layer is Mamba-2 or half-rotated attention, then a gated MLP."""

from typing import Any

from mcore_ckpt.families.common.decoder import (
    ATTENTION_BIAS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    gated_rules,
)
from mcore_ckpt.families.common.fields import Fields, setting
from mcore_ckpt.families.recurrent.mamba_parts import MAMBA, SQUARE_HEADS, hybrid_table
from mcore_ckpt.mapping.rules import Table
from mcore_models.layer_patterns import pattern_layers


def _read_layers(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    attention = set(fields.maybe("attn_layer_indices") or ())
    layers = ("[*-]" if i in attention else "[M-]" for i in range(ours["num_layers"]))
    return {"hybrid_override_pattern": "".join(layers)}


def _write_layers(description: Description, _: Theirs) -> Theirs:
    layers = pattern_layers(setting(description, "hybrid_override_pattern"))
    return {"attn_layer_indices": [i for i, layer in enumerate(layers) if "*" in layer]}


def _table(description: Description) -> Table:
    norms = {"attention": "input_layernorm", "mlp": "pre_ff_layernorm"}
    mlp = gated_rules("mlp.", "feed_forward.")
    return hybrid_table(description, norms, mlp, "final_layernorm")


FAMILY = Decoder(
    model_type="bamba",
    architecture="BambaForCausalLM",
    # transformers rotates half of each head and ignores the share in config.json.
    fixed={"rotary_percent": 0.5},
    absent={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "intermediate_size": 14336,
    },
    refused={"mlp_bias": False, "z_loss_coefficient": 0},
    unread=("num_logits_to_keep", "layers_block_type", "layer_types"),
    parts=(
        SQUARE_HEADS,
        MAMBA,
        ATTENTION_BIAS,
        FieldRule(keep=("layer_types",), read=_read_layers, write=_write_layers),
    ),
    layers=("M-", "*-"),
    partial=1.0,
    weights=_table,
)
