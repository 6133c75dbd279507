"""Fields and rules of weights shared by families with Mamba-2 layers."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import (
    Description,
    FieldRule,
    Theirs,
    around,
    attention_rules,
    tied_copies,
    with_head,
)
from mcore_ckpt.families.common.fields import (
    DEFAULTS,
    Fields,
    expert_setting,
    read_pairs,
    setting,
    settings,
)
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.layer_patterns import pattern_layers
from mcore_models.logical_tensors import mamba_sizes

HYBRID = (
    "hybrid_override_pattern",
    *(name for name in DEFAULTS if name.startswith("mamba_") and name != "mamba_norm"),
)
"""Our fields of the layer pattern and of Mamba layers."""

MAMBA_PAIRS = (
    ("norm_epsilon", "layer_norm_epsilon", 1e-5),
    ("mamba_num_groups", "n_groups", 8),
    ("mamba_conv_kernel", "conv_kernel", 4),
    ("mamba_conv_bias", "use_conv_bias", True),
    ("mamba_proj_bias", "use_bias", False),
    ("mamba_dt_min", "time_step_min", 0.001),
    ("mamba_dt_max", "time_step_max", 0.1),
    ("mamba_dt_init_floor", "time_step_floor", 1e-4),
)
"""``Pairs`` of Mamba fields for Mamba-2 and Nemotron-H."""
SIZE_PAIRS = (
    ("mamba_num_heads", "mamba_n_heads", 128),
    ("mamba_num_groups", "mamba_n_groups", 1),
    ("mamba_state_dim", "mamba_d_state", 256),
    ("mamba_conv_kernel", "mamba_d_conv", 4),
    ("mamba_chunk_size", "mamba_chunk_size", 256),
    ("mamba_conv_bias", "mamba_conv_bias", True),
    ("mamba_proj_bias", "mamba_proj_bias", False),
)
"""``Pairs`` of Mamba fields for Bamba and Granite 4."""


def read_sizes(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    """Return our sizes of Mamba-2 layers, by ``SIZE_PAIRS``."""
    sizes = read_pairs(fields, SIZE_PAIRS)
    expand, width = fields.take("mamba_expand", 2), fields.take("mamba_d_head", "auto")
    heads = sizes["mamba_num_heads"]
    sizes["mamba_head_dim"] = (
        expand * ours["hidden_size"] // heads if width == "auto" else width
    )
    limit = fields.maybe("time_step_limit")
    sizes["mamba_dt_limit"] = read_limit(limit or (0.0, math.inf))
    return sizes


def write_sizes(description: Description) -> Theirs:
    """Return their sizes of Mamba-2 layers, except the width of all heads together."""
    config = settings(description)
    return {
        **{there: getattr(config, ours) for ours, there, _ in SIZE_PAIRS},
        "mamba_n_heads": mamba_sizes(config).heads,
        "mamba_d_head": config.mamba_head_dim,
        "time_step_limit": write_limit(config.mamba_dt_limit),
    }


def _write_mamba(description: Description, _: Theirs) -> Theirs:
    return {**write_sizes(description), "mamba_expand": expansion(description)}


MAMBA = FieldRule(covers=HYBRID, read=read_sizes, write=_write_mamba)
"""Rule of Mamba-2 layers whose heads together are a multiple of the hidden size wide."""


def _square_heads(_: Description, theirs: Theirs) -> Theirs:
    if theirs.pop("head_dim") * theirs["num_attention_heads"] != theirs["hidden_size"]:
        raise ValueError("it cannot express --kv-channels")
    return {}


SQUARE_HEADS = FieldRule(write=_square_heads)
"""Attention heads together are as wide as the model: no field ``head_dim``."""


def read_limit(limit: Any) -> list[float]:
    """Convert bounds of step sizes: an infinite upper bound is 0 in our fields."""
    # transformers 5 writes {"__float__": "Infinity"}, older releases Infinity.
    low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in limit)
    return [low, 0.0 if high == math.inf else high]


def write_limit(limit: Any) -> list[float]:
    """Inverse of ``read_limit``."""
    low, high = limit
    return [low, high or math.inf]


def expansion(description: Mapping[str, Any]) -> int:
    """Return the width of all Mamba heads together, divided by the hidden size."""
    config = settings(description)
    inner, hidden = mamba_sizes(config).inner, config.hidden_size
    if inner % hidden:
        raise ValueError(
            f"it cannot express {inner} channels of Mamba heads: only multiples of "
            f"--hidden-size {hidden}"
        )
    return inner // hidden


def mamba_rules(
    description: Mapping[str, Any],
    there: str,
    layers: tuple[int, ...] | None = None,
) -> list[Rule]:
    """Return the rules of one Mamba-2 mixer, with the names that all families use.

    Args:
        description: description of the model.
        there: prefix of their names of the mixer, up to the dot.
        layers: layers that have a mixer; None: all.
    """
    config, ours = settings(description), "blocks.*.mamba."
    sizes = mamba_sizes(config)
    inner, states = sizes.inner, sizes.states
    kinds = ("weight", "bias")
    rules = []
    for kind in kinds if config.mamba_proj_bias else kinds[:1]:
        parts = tuple(f"{ours}in_proj.{name}.{kind}" for name in ("z", "x", "B", "C", "dt"))
        rows = (inner, inner, states, states, sizes.heads)
        rules.append(Rule(parts, f"{there}in_proj.{kind}", sizes=rows, layers=layers))
        rules.append(Rule(f"{ours}out_proj.{kind}", f"{there}out_proj.{kind}", layers=layers))
    for kind in kinds if config.mamba_conv_bias else kinds[:1]:
        parts = tuple(f"{ours}conv1d.{name}.{kind}" for name in ("x", "B", "C"))
        rows = (inner, states, states)
        rules.append(Rule(parts, f"{there}conv1d.{kind}", sizes=rows, layers=layers))
    vectors = ("dt_bias", "A_log", "D", *["norm.weight"] * (config.mamba_norm != "none"))
    for name in vectors:
        rules.append(Rule(f"{ours}{name}", f"{there}{name}", layers=layers))
    return rules


def below_backbone(
    description: Mapping[str, Any], rules: Iterable[Rule], droppable: tuple[str, ...] = ()
) -> Table:
    """Return the rules of weights below ``backbone.``, given those of the layers."""
    embedding = "backbone.embeddings.weight"
    first = Rule("embedding.weight", embedding)
    last = Rule("final_norm.weight", "backbone.norm_f.weight")
    return with_head(description, (first, *rules, last), embedding, droppable=droppable)


def hybrid_table(
    description: Mapping[str, Any],
    norms: Mapping[str, str],
    halves: Iterable[Rule],
    final_norm: str = "norm",
) -> Table:
    """Return the rules of a model with Mamba-2 or attention and an MLP half in each layer.

    Args:
        description: description of the model.
        norms: their names of the norms before ``attention`` and ``mlp``.
        halves: rules of the MLP halves.
        final_norm: their name of the final norm.
    """
    layers = pattern_layers(setting(description, "hybrid_override_pattern"))
    mixers = {"mamba": "M", "attention": "*"}
    layers_of = {
        name: tuple(i for i, layer in enumerate(layers) if letter in layer)
        for name, letter in mixers.items()
    }
    there = "model.layers.*."
    rules = [
        Rule(
            f"blocks.*.{name}_norm.weight",
            f"{there}{norms['attention']}.weight",
            layers=layer_ids,
        )
        for name, layer_ids in layers_of.items()
    ]
    rules += mamba_rules(description, f"{there}mamba.", layers=layers_of["mamba"])
    rules += [
        replace(rule, layers=layers_of["attention"])
        for rule in attention_rules(description, {})
    ]
    rules.append(Rule("blocks.*.mlp_norm.weight", f"{there}{norms['mlp']}.weight"))
    ends = renamed_norm(around(description, [*rules, *halves]), final_norm)
    num_experts = expert_setting(description, "num_experts")
    return Table(ends, len(layers), num_experts, copies=tied_copies(description))


def renamed_norm(rules: Iterable[Rule], name: str) -> tuple[Rule, ...]:
    """Return rules with another foreign name of the final norm."""
    return tuple(
        replace(rule, theirs=rule.theirs.replace("model.norm.", f"model.{name}.", 1))
        for rule in rules
    )
