"""Bamba: Mamba-2 or half-rotated attention, then a gated feed-forward layer, in every layer."""

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
from mcore_ckpt.families.common.defaults import HYBRID
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, read_pairs, require, setting, settings
from mcore_ckpt.families.recurrent.mamba2 import (
    expansion,
    layers_of,
    mamba_rules,
    read_limit,
    write_limit,
)
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_parallel.layer_patterns import pattern_layers
from mcore_parallel.logical_tensors import mamba_sizes

PAIRS = (
    ("mamba_num_heads", "mamba_n_heads", 128),
    ("mamba_num_groups", "mamba_n_groups", 1),
    ("mamba_state_dim", "mamba_d_state", 256),
    ("mamba_conv_kernel", "mamba_d_conv", 4),
    ("mamba_chunk_size", "mamba_chunk_size", 256),
    ("mamba_conv_bias", "mamba_conv_bias", True),
    ("mamba_proj_bias", "mamba_proj_bias", False),
)
_ABSENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "intermediate_size": 14336,
}
_ROTATED = 0.5
"""Share of each head that rotates, whatever config.json says."""


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, keep=("layer_types",), absent=_ABSENT)
    fields.must_be("mlp_bias", False)
    fields.must_be("z_loss_coefficient", 0.0, 0)
    fields.maybe("num_logits_to_keep")
    fields.maybe("partial_rotary_factor")
    ours = read_rms_silu(fields, partial=True) | {"rotary_percent": _ROTATED}
    ours |= read_mamba(fields, ours["hidden_size"])
    ours["add_attention_bias"] = fields.take("attention_bias", False)
    attention = set(fields.maybe("attn_layer_indices") or ())
    for name in ("layers_block_type", "layer_types"):
        fields.maybe(name)
    ours["hybrid_override_pattern"] = "".join(
        "[*-]" if layer in attention else "[M-]" for layer in range(ours["num_layers"])
    )
    return fields.described(ours)


def read_mamba(fields: Fields, inner: int) -> dict[str, Any]:
    """Read the sizes of Mamba-2 layers.

    Args:
        fields: of the config.json.
        inner: channels of all heads for each unit of ``mamba_expand``.
    """
    ours = read_pairs(fields, PAIRS)
    expand, width = fields.take("mamba_expand", 2), fields.take("mamba_d_head", "auto")
    heads = ours["mamba_num_heads"]
    ours["mamba_head_dim"] = expand * inner // heads if width == "auto" else width
    limit = fields.maybe("time_step_limit")
    ours["mamba_dt_limit"] = read_limit(limit or (0.0, float("inf")))
    return ours


def write_mamba(description: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``read_mamba``, for heads that are a multiple of the hidden size together.

    Raises:
        ValueError: for other widths.
    """
    config = settings(description)
    return {
        **{there: getattr(config, ours) for ours, there, _ in PAIRS},
        "mamba_n_heads": mamba_sizes(config).heads,
        "mamba_d_head": config.mamba_head_dim,
        "mamba_expand": expansion(description),
        "time_step_limit": write_limit(setting(description, "mamba_dt_limit")),
    }


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    layers = layers_of(description, "M-", "*-")
    no_experts(description)
    require(description, rotary_percent=_ROTATED, qk_layernorm=False, window_size=(-1, 0))
    require(description, add_bias_linear=False, add_qkv_bias=False)
    says = (*HYBRID, "add_attention_bias")
    theirs = write_rms_silu(description, "BambaForCausalLM", partial=True, says=says)
    if theirs.pop("head_dim") * theirs["num_attention_heads"] != theirs["hidden_size"]:
        raise ValueError("it cannot say --kv-channels")
    return theirs | {
        "model_type": "bamba",
        **write_mamba(description),
        "attention_bias": setting(description, "add_attention_bias"),
        "attn_layer_indices": [i for i, layer in enumerate(layers) if "*" in layer],
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    norms = {"attention": "input_layernorm", "mlp": "pre_ff_layernorm"}
    mlp = [
        Rule(rule.ours, rule.theirs.replace(".mlp.", ".feed_forward."))
        for rule in mlp_rules(description)
    ]
    return hybrid_table(description, norms, mlp, "final_layernorm")


def hybrid_table(
    description: Mapping[str, Any],
    norms: Mapping[str, str],
    halves: list[Rule],
    final_norm: str = "norm",
    num_experts: int = 0,
) -> Table:
    """List the weights of layers that are Mamba-2 or attention, then something else.

    Args:
        description: of the model.
        norms: names of the norms before each of the two.
        halves: rules of what comes second.
        final_norm: name of the last norm.
        num_experts: range of the second ``*``.
    """
    layers = pattern_layers(setting(description, "hybrid_override_pattern"))
    mixers = {"mamba": "M", "attention": "*"}
    places = {
        name: tuple(i for i, layer in enumerate(layers) if letter in layer)
        for name, letter in mixers.items()
    }
    there = "model.layers.*."
    rules = [
        Rule(f"blocks.*.{name}_norm.weight", f"{there}{norms['attention']}.weight", layers=at)
        for name, at in places.items()
    ]
    rules += mamba_rules(description, f"{there}mamba.", layers=places["mamba"])
    rules += [
        replace(rule, layers=places["attention"]) for rule in attention_rules(description, {})
    ]
    rules.append(Rule("blocks.*.mlp_norm.weight", f"{there}{norms['mlp']}.weight"))
    ends = around(description, [*rules, *halves])
    ends = tuple(
        replace(rule, theirs=f"model.{final_norm}.weight")
        if rule.theirs == "model.norm.weight"
        else rule
        for rule in ends
    )
    return Table(ends, len(layers), num_experts, copies=tied_copies(description))
