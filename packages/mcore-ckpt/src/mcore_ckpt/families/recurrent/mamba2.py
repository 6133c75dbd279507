"""Mamba-2: state-space layers alone; five matrices share one input projection."""

import math
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.defaults import HYBRID
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import (
    REQUIRED,
    Fields,
    read_pairs,
    refuse_variants,
    require,
    require_family,
    setting,
    settings,
)
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_parallel.layer_patterns import pattern_layers
from mcore_parallel.logical_tensors import mamba_sizes

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
"""Fields of Mamba layers that Mamba-2 and Nemotron-H name alike."""
PAIRS = (
    ("num_layers", "num_hidden_layers", REQUIRED),
    ("hidden_size", "hidden_size", REQUIRED),
    ("mamba_num_heads", "num_heads", 128),
    ("mamba_head_dim", "head_dim", 64),
    ("mamba_state_dim", "state_size", 128),
    ("mamba_chunk_size", "chunk_size", 256),
    ("init_method_std", "initializer_range", 0.1),
    *MAMBA_PAIRS,
)

_FIXED: dict[str, Any] = {
    "position_embedding_type": "none",
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,
}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config)
    fields.must_be("hidden_act", "silu")
    fields.must_be("rms_norm", True)
    fields.must_be("norm_before_gate", True, False)  # transformers heeds it not
    # There is no attention: one head of it fits any width.
    ours = read_pairs(fields, PAIRS) | _FIXED | {"num_attention_heads": 1}
    fields.take("expand", 2)  # num_heads x head_dim / hidden_size: the weights show it
    ours["hybrid_override_pattern"] = "M" * ours["num_layers"]
    ours["mamba_dt_limit"] = read_limit(fields.take("time_step_limit", (0.0, math.inf)))
    ours["untie_embeddings_and_output_weights"] = not fields.take("tie_word_embeddings", False)
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    layers_of(description, "M")
    no_experts(description)
    refuse_variants(description, *HYBRID)
    require(description, **_FIXED, hidden_dropout=0.0)
    config = settings(description)
    return {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "vocab_size": description["vocab_size"],
        **{there: getattr(config, ours) for ours, there, _ in PAIRS},
        "num_heads": mamba_sizes(config).heads,
        "expand": expansion(description),
        "time_step_limit": write_limit(setting(description, "mamba_dt_limit")),
        "hidden_act": "silu",
        "rms_norm": True,
        "tie_word_embeddings": _is_tied(description),
    }


def read_limit(limit: Any) -> list[float]:
    """Read bounds of step sizes: where theirs have no upper one, ours is 0."""
    # transformers 5 writes {"__float__": "Infinity"}, those before it Infinity.
    low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in limit)
    return [low, 0.0 if high == math.inf else high]


def write_limit(limit: Any) -> list[float]:
    """Undo ``read_limit``."""
    low, high = limit
    return [low, high or math.inf]


def expansion(description: Mapping[str, Any]) -> int:
    """Return how many times as wide as the stream all Mamba heads are together.

    Raises:
        ValueError: if that is no whole number.
    """
    config = settings(description)
    inner, hidden = mamba_sizes(config).inner, config.hidden_size
    if inner % hidden:
        raise ValueError(
            f"it cannot say {inner} channels of Mamba heads: only multiples of "
            f"--hidden-size {hidden}"
        )
    return inner // hidden


def layers_of(description: Mapping[str, Any], *known: str) -> tuple[str, ...]:
    """Return the layers of a pattern, each of them of a kind that a family has.

    Raises:
        ValueError: with the pattern, if there are none or others; for another family.
    """
    require_family(description, "gpt")
    pattern = setting(description, "hybrid_override_pattern")
    layers = pattern_layers(pattern)
    if not layers or not set(layers) <= set(known):
        kinds = ", ".join(one if len(one) == 1 else f"[{one}]" for one in known)
        raise ValueError(f"it cannot say --hybrid-override-pattern {pattern!r}: only {kinds}")
    return layers


def mamba_rules(
    description: Mapping[str, Any],
    there: str,
    ours: str = "blocks.*.mamba.",
    layers: tuple[int, ...] | None = None,
) -> list[Rule]:
    """Rules of one Mamba-2 mixer, which transformers names alike in all families.

    Args:
        description: of the model.
        there: where the mixer is, up to the dot.
        ours: where ours is.
        layers: that have one; None: all.
    """
    config = settings(description)
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


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    tied = _is_tied(description)
    rules = (
        Rule("embedding.weight", "backbone.embeddings.weight"),
        Rule("blocks.*.mamba_norm.weight", "backbone.layers.*.norm.weight"),
        *mamba_rules(description, "backbone.layers.*.mixer."),
        Rule("final_norm.weight", "backbone.norm_f.weight"),
        *([] if tied else [Rule("head.weight", "lm_head.weight")]),
    )
    copies = {"lm_head.weight": "backbone.embeddings.weight"} if tied else {}
    return Table(rules, setting(description, "num_layers"), copies=copies)


def _is_tied(description: Mapping[str, Any]) -> bool:
    return not setting(description, "untie_embeddings_and_output_weights")
