"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import decoder_table, read_rms_silu, write_rms_silu
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require
from mcore_ckpt.families.common.layer_types import FULL, LOCAL, read_windows, write_windows

table = decoder_table

ABSENT = {"num_key_value_heads": 32}
"""What fields mean that are not there."""


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, keep=("layer_types", "max_window_layers"), absent=ABSENT)
    ours = read_rms_silu(fields) | {"add_qkv_bias": True}
    ours |= read_upper_windows(fields, ours["num_layers"])
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, qk_layernorm=False, add_bias_linear=False, add_qkv_bias=True)
    theirs = write_rms_silu(description, "Qwen2ForCausalLM", says=("window_attn_skip_freq",))
    return {"model_type": "qwen2", **theirs, **write_upper_windows(description)}


def read_upper_windows(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Read a window that the layers from ``max_window_layers`` on have, unless they are named.

    Raises:
        ValueError: for a kind of layer that we cannot represent.
    """
    first = fields.take("max_window_layers", 28)
    if not fields.take("use_sliding_window", False):
        fields.maybe("sliding_window")
        fields.maybe("layer_types")
        return {}
    default = [LOCAL if layer >= first else FULL for layer in range(num_layers)]
    types = fields.maybe("layer_types") or default
    size = fields.maybe("sliding_window", 4096)
    return read_windows(
        Fields({"layer_types": types, "sliding_window": size}, ("layer_types",)), num_layers, 0
    )


def write_upper_windows(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a window and the layers that have it, whichever they are."""
    windows = write_windows(description)
    if windows["sliding_window"] is None:
        return {"use_sliding_window": False}
    types = windows["layer_types"]
    first = types.index(LOCAL) if LOCAL in types else len(types)
    return {**windows, "use_sliding_window": True, "max_window_layers": first}


def no_window(fields: Fields) -> None:
    """Use up the fields of a sliding window that is switched off.

    Raises:
        ValueError: if it is on: some layers then have one, which we cannot say.
    """
    fields.must_be("use_sliding_window", False)
    fields.take("sliding_window", 0)
