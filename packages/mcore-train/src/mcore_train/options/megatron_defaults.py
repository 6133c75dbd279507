"""Megatron's defaults by which the same flags describe another model than here.

``--megatron-defaults`` uses all of them; the values are in megatron_flags.toml. For a command
line in Megatron's spelling without that flag, a log line lists the defaults that differ.
"""

from collections.abc import Collection, Mapping
from typing import Any

from mcore_base.command_line import list_options
from mcore_train.composition import TrainConfig
from mcore_train.options.megatron_flags import megatron_default
from mcore_train.options.recipe import Value, to_flags

MODEL_DEFAULTS = (
    *("normalization", "norm_epsilon", "swiglu", "add_bias_linear", "position_embedding_type"),
    *("hidden_dropout", "attention_dropout"),
)
"""Options of every model."""

LATENT_DEFAULTS = ("kv_lora_rank", "rope_type", "rotary_scaling_factor")
"""Further options of models with latent attention, which always rotate positions."""

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
    options = {option.name: option for option in list_options(config_type)}
    is_latent = given.get("multi_latent_attention")
    names = [*MODEL_DEFAULTS, *(LATENT_DEFAULTS if is_latent else ())]
    megatron_values = {
        name: megatron_default(options[name]) for name in names if name in options
    }
    if is_latent:
        megatron_values["rope_type"] = "yarn"  # set by Megatron's config of latent attention
        megatron_values.pop("position_embedding_type", None)
    if given.get("fp8_format"):
        megatron_values["fp8_recipe"] = "delayed"
    has_biases = given.get("add_bias_linear", True)
    has_gelu = not any(given.get(name) for name in _OTHER_ACTIVATIONS)
    if has_biases and has_gelu and _EXACT_GELU not in foreign:
        # Megatron's fused bias-and-GELU kernel, on by default, uses the tanh form.
        if "feed_forward_proj" in options:
            megatron_values["feed_forward_proj"] = "gelu_tanh"
        else:
            megatron_values["openai_gelu"] = True
    return {
        name: value
        for name, value in megatron_values.items()
        if name not in given and name in options and options[name].default != value
    }


def describe(missing: Mapping[str, Value]) -> str:
    """Return the log line that lists Megatron's model defaults that a run does not use."""
    return (
        f"Megatron's defaults that this run does not use: {' '.join(to_flags(missing))}. Give "
        "--megatron-defaults to take all of them, or the flags themselves."
    )
