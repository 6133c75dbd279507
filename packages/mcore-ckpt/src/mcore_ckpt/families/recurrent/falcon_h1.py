"""Falcon-H1: Mamba-2 and attention side by side in every layer, and a factor on every part.

Factors that follow each other are one of ours: those on keys and on attention's input scale its
scores and its output, that on Mamba's input all that is projected.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import Decoder, Description, FieldRule, Theirs
from mcore_ckpt.families.common.decoder_rules import (
    around,
    attention_rules,
    gated_rules,
    tied_copies,
)
from mcore_ckpt.families.common.defaults import HYBRID
from mcore_ckpt.families.common.fields import Fields, setting, settings
from mcore_ckpt.families.recurrent.mamba_parts import (
    mamba_rules,
    read_sizes,
    renamed_norm,
    write_sizes,
)
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_parallel.logical_tensors import mamba_sizes

_WIDTH = 1024
"""Of all heads where nothing is said."""
_FACTORS = {
    "embedding_multiplier": "embedding_multiplier",
    "logits_multiplier": "lm_head_multiplier",
    "mamba_output_multiplier": "ssm_out_multiplier",
}
_MLP = {"mlp_gate_multiplier": 0, "mlp_output_multiplier": 1}
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # The width of all heads, where it is said, derives that of one, whatever mamba_expand is.
    width, heads = config.get("mamba_d_ssm", _WIDTH), config.get("mamba_n_heads", 128)
    is_derived = config.get("mamba_d_head") in (None, "auto") and width is not None
    return {**config, "mamba_d_head": width // heads} if is_derived else config


def _read_mamba(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    found = read_sizes(fields, ours)
    biased = found["mamba_proj_bias"]
    fields.must_be("projectors_bias", bool(biased))
    heads, each = found["mamba_num_heads"], found["mamba_head_dim"]
    width = fields.maybe("mamba_d_ssm", _WIDTH)
    if width is not None and each * heads != width:
        raise ValueError(
            f"config.json has mamba_d_ssm={width}, which is not mamba_n_heads={heads} x "
            f"mamba_d_head={each}."
        )
    is_first = fields.take("mamba_norm_before_gate", True)
    has_norm = fields.take("mamba_rms_norm", False)
    norm = ("before_gate" if is_first else "gated") if has_norm else "none"
    pattern = "[P-]" * ours["num_layers"]
    return {**found, "mamba_norm": norm, "hybrid_override_pattern": pattern}


def _write_mamba(description: Description, _: Theirs) -> Theirs:
    config = settings(description)
    return {
        **write_sizes(description),
        "mamba_d_ssm": mamba_sizes(config).inner,
        "projectors_bias": config.mamba_proj_bias,
        "mamba_rms_norm": config.mamba_norm != "none",
        "mamba_norm_before_gate": config.mamba_norm != "gated",
    }


def _read_factors(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        mine: float(fields.take(there, 1.0)) for mine, there in _FACTORS.items()
    }
    gate_and_output = fields.take("mlp_multipliers", [1.0, 1.0])
    found |= {name: float(gate_and_output[place]) for name, place in _MLP.items()}
    entering = float(fields.take("ssm_in_multiplier", 1.0))
    parts = fields.take("ssm_multipliers", [1.0] * 5)
    found["mamba_multipliers"] = [entering * float(factor) for factor in parts]
    read = float(fields.take("attention_in_multiplier", 1.0))
    keys = float(fields.take("key_multiplier", 1.0))
    if keys * read != 1.0:
        found["softmax_scale"] = keys * read * read * ours["kv_channels"] ** -0.5
    written = float(fields.take("attention_out_multiplier", 1.0))
    found["attention_output_multiplier"] = read * written
    return found


def _write_factors(description: Description, theirs: Theirs) -> Theirs:
    scale = setting(description, "softmax_scale")
    return {
        **{there: setting(description, mine) for mine, there in _FACTORS.items()},
        "mlp_multipliers": [setting(description, name) for name in _MLP],
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": list(setting(description, "mamba_multipliers")),
        "attention_in_multiplier": 1.0,
        "key_multiplier": scale * theirs["head_dim"] ** 0.5 if scale else 1.0,
        "attention_out_multiplier": setting(description, "attention_output_multiplier"),
    }


def _table(description: Description) -> Table:
    ours, there = "blocks.*.mamba_attention.", "model.layers.*."
    norms = [
        Rule(f"blocks.*.{mine}.weight", f"{there}{theirs}.weight")
        for mine, theirs in _NORMS.items()
    ]
    attention = [
        replace(rule, ours=str(rule.ours).replace("blocks.*.", ours, 1))
        for rule in attention_rules(description, {})
    ]
    mamba = mamba_rules(description, f"{there}mamba.", f"{ours}mamba.")
    layer = [*norms, *mamba, *attention, *gated_rules("mlp.", "feed_forward.")]
    return Table(
        renamed_norm(around(description, layer), "final_layernorm"),
        setting(description, "num_layers"),
        copies=tied_copies(description),
    )


_FACTORS_SAID = (
    *("mamba_multipliers", "attention_output_multiplier", "softmax_scale"),
    *(*_FACTORS, *_MLP),
)

FAMILY = Decoder(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    absent={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "intermediate_size": 14336,
    },
    refused={"attention_bias": False, "mlp_bias": False},
    unread=("num_logits_to_keep", "layers_block_type"),
    parts=(
        FieldRule(says=(*HYBRID, "mamba_norm"), read=_read_mamba, write=_write_mamba),
        FieldRule(says=_FACTORS_SAID, read=_read_factors, write=_write_factors),
    ),
    layers=("P-",),
    stated=_stated,
    weights=_table,
)
