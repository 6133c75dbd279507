"""Megatron's defaults that make another model of the same flags, and which of them a run lacks.

``--megatron-defaults`` takes all of them. A command line in Megatron's spelling without that
flag is told which of them it does not have.
"""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any

from mcore_base.options import types_of
from mcore_train.composition import TrainConfig
from mcore_train.options.recipe import Value, to_flags

MODEL_DEFAULTS: Mapping[str, Value] = {
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "swiglu": False,
    "add_bias_linear": True,
    "position_embedding_type": "learned_absolute",
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
"""Of every model."""

LATENT_DEFAULTS: Mapping[str, Value] = {
    "kv_lora_rank": 32,
    "rope_type": "yarn",
    "rotary_scaling_factor": 1.0,
}
"""Of models with latent attention, whose positions are always rotated."""

_OTHER_ACTIVATIONS = ("swiglu", "quick_geglu", "squared_relu", "geglu", "exact_geglu")
_EXACT_GELU = "--no-bias-gelu-fusion"


def defaults_not_taken(
    given: Mapping[str, Any], foreign: Collection[str], config_type: type[TrainConfig]
) -> dict[str, Value]:
    """Return Megatron's model defaults that differ from ours, of options that are not given.

    Args:
        given: options of the command line and of recipes, by name.
        foreign: flags of Megatron's that are not ours, as given.
        config_type: of the command, whose defaults are compared.
    """
    ours = {
        field.name: field.default
        for part in types_of(config_type).values()
        for field in fields(part)
        if field.default is not MISSING
    }
    theirs = dict(MODEL_DEFAULTS)
    if given.get("multi_latent_attention"):
        theirs |= LATENT_DEFAULTS
        del theirs["position_embedding_type"]
    if given.get("fp8_format"):
        theirs["fp8_recipe"] = "delayed"
    has_biases = given.get("add_bias_linear", True)
    has_gelu = not any(given.get(name) for name in _OTHER_ACTIVATIONS)
    if has_biases and has_gelu and _EXACT_GELU not in foreign:
        # Its kernel of bias and GELU, on by default, computes GELU by tanh.
        if "feed_forward_proj" in ours:
            theirs["feed_forward_proj"] = "gelu_tanh"
        else:
            theirs["openai_gelu"] = True
    return {
        name: value
        for name, value in theirs.items()
        if name not in given and name in ours and ours[name] != value
    }


def describe(missing: Mapping[str, Value]) -> str:
    """Return the line that tells a run in Megatron's spelling what it lacks."""
    return (
        f"Megatron's defaults that this run does not take: {' '.join(to_flags(missing))}. Give "
        "--megatron-defaults to take all of them, or the flags themselves."
    )
