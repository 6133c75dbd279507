"""Mistral: Llama with a sliding window and no biases."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families import llama
from mcore_ckpt.families.decoder import Fields, read_common, require, setting, write_common
from mcore_ckpt.rules import Table


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config)
    # A window of w tokens counts the token itself; ours counts those before it.
    ours = read_common(fields) | {"window_size": [fields.take("sliding_window", 0) - 1, 0]}
    vocab_size = fields.take("vocab_size")
    fields.finish()
    return {"family": "gpt", "vocab_size": vocab_size, "config": ours, "moe": {}}


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    llama.no_experts(description)
    require(description, qk_layernorm=False, add_bias_linear=False, add_qkv_bias=False)
    before = setting(description, "window_size")[0]
    theirs = {"model_type": "mistral", **write_common(description, "MistralForCausalLM")}
    return theirs | {"sliding_window": before + 1 or None}


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    return llama.table(description)
