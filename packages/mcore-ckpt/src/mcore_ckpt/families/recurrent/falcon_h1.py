"""Falcon-H1: Mamba-2 and attention side by side in every layer, and a factor on every part.

Factors that follow each other are one of ours: those on keys and on attention's input scale its
scores and its output, that on Mamba's input all that is projected.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import (
    around,
    attention_rules,
    mlp_rules,
    read_rms_silu,
    tied_copies,
    write_rms_silu,
)
from mcore_ckpt.families.common.defaults import HYBRID, HYBRID_VARIANTS
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require, setting, settings
from mcore_ckpt.families.recurrent.bamba import PAIRS, read_mamba
from mcore_ckpt.families.recurrent.mamba2 import layers_of, mamba_rules, write_limit
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_parallel.logical_tensors import mamba_sizes

_ABSENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "intermediate_size": 14336,
}
_FACTORS = {
    "embedding_multiplier": "embedding_multiplier",
    "logits_multiplier": "lm_head_multiplier",
    "mamba_output_multiplier": "ssm_out_multiplier",
}
_MLP = {"mlp_gate_multiplier": 0, "mlp_output_multiplier": 1}
_NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "pre_ff_layernorm",
}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, absent=_ABSENT)
    for name in ("attention_bias", "mlp_bias"):
        fields.must_be(name, False)
    fields.must_be("projectors_bias", bool(config.get("mamba_proj_bias")))
    fields.maybe("num_logits_to_keep")
    fields.maybe("layers_block_type")
    ours = read_rms_silu(fields)
    width = fields.maybe("mamba_d_ssm", 1024)
    ours |= read_mamba(fields, ours["hidden_size"])
    if width is not None:
        heads = ours["mamba_num_heads"]
        if config.get("mamba_d_head", "auto") == "auto":
            ours["mamba_head_dim"] = width // heads
        elif ours["mamba_head_dim"] * heads != width:
            raise ValueError(
                f"config.json has mamba_d_ssm={width}, which is not mamba_n_heads={heads} x "
                f"mamba_d_head={ours['mamba_head_dim']}."
            )
    is_first = fields.take("mamba_norm_before_gate", True)
    has_norm = fields.take("mamba_rms_norm", False)
    ours["mamba_norm"] = ("before_gate" if is_first else "gated") if has_norm else "none"
    ours |= {mine: float(fields.take(there, 1.0)) for mine, there in _FACTORS.items()}
    gate_and_output = fields.take("mlp_multipliers", [1.0, 1.0])
    ours |= {name: float(gate_and_output[place]) for name, place in _MLP.items()}
    entering = float(fields.take("ssm_in_multiplier", 1.0))
    parts = fields.take("ssm_multipliers", [1.0] * 5)
    ours["mamba_multipliers"] = [entering * float(factor) for factor in parts]
    read = float(fields.take("attention_in_multiplier", 1.0))
    keys = float(fields.take("key_multiplier", 1.0))
    if keys * read != 1.0:
        ours["softmax_scale"] = keys * read * read * ours["kv_channels"] ** -0.5
    written = float(fields.take("attention_out_multiplier", 1.0))
    ours["attention_output_multiplier"] = read * written
    ours["hybrid_override_pattern"] = "[P-]" * ours["num_layers"]
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    layers_of(description, "P-")
    no_experts(description)
    require(description, qk_layernorm=False, add_bias_linear=False, add_qkv_bias=False)
    require(description, window_size=(-1, 0))
    said = (*HYBRID, *HYBRID_VARIANTS, *_FACTORS, *_MLP, "softmax_scale")
    theirs = write_rms_silu(description, "FalconH1ForCausalLM", says=said)
    config, norm = settings(description), setting(description, "mamba_norm")
    sizes = mamba_sizes(config)
    scale = setting(description, "softmax_scale")
    return theirs | {
        "model_type": "falcon_h1",
        **{there: getattr(config, ours) for ours, there, _ in PAIRS},
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": config.mamba_head_dim,
        "mamba_d_ssm": sizes.inner,
        "projectors_bias": config.mamba_proj_bias,
        "time_step_limit": write_limit(setting(description, "mamba_dt_limit")),
        "mamba_rms_norm": norm != "none",
        "mamba_norm_before_gate": norm != "gated",
        **{there: setting(description, mine) for mine, there in _FACTORS.items()},
        "mlp_multipliers": [setting(description, name) for name in _MLP],
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": list(setting(description, "mamba_multipliers")),
        "attention_in_multiplier": 1.0,
        "key_multiplier": scale * theirs["head_dim"] ** 0.5 if scale else 1.0,
        "attention_out_multiplier": setting(description, "attention_output_multiplier"),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    ours, there = "blocks.*.mamba_attention.", "model.layers.*."
    norms = [
        Rule(f"blocks.*.{mine}.weight", f"{there}{theirs}.weight")
        for mine, theirs in _NORMS.items()
    ]
    attention = [
        replace(rule, ours=str(rule.ours).replace("blocks.*.", ours, 1))
        for rule in attention_rules(description, {})
    ]
    mlp = [
        Rule(rule.ours, rule.theirs.replace(".mlp.", ".feed_forward."))
        for rule in mlp_rules(description)
    ]
    mamba = mamba_rules(description, f"{there}mamba.", f"{ours}mamba.")
    ends = [
        replace(rule, theirs=rule.theirs.replace("model.norm", "model.final_layernorm"))
        for rule in around(description, [*norms, *mamba, *attention, *mlp])
    ]
    return Table(
        tuple(ends), setting(description, "num_layers"), copies=tied_copies(description)
    )
