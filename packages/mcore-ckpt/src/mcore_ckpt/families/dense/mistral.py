"""Mistral: Llama with a sliding window and no biases."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import decoder_table, read_rms_silu, write_rms_silu
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require, setting

table = decoder_table

_ABSENT = {"sliding_window": 4096, "num_key_value_heads": 8}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, absent=_ABSENT)
    ours = read_rms_silu(fields) | {"window_size": read_window(fields)}
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, qk_layernorm=False, add_bias_linear=False, add_qkv_bias=False)
    theirs = {"model_type": "mistral", **write_rms_silu(description, "MistralForCausalLM")}
    return theirs | write_window(description)


def read_window(fields: Fields) -> list[int]:
    """Read a sliding window: theirs of w tokens counts the token itself, ours those before."""
    return [fields.take("sliding_window", 0) - 1, 0]


def write_window(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a sliding window; null is none."""
    return {"sliding_window": setting(description, "window_size")[0] + 1 or None}
