"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.decoder import decoder_table, gpt, read_rms_silu, write_rms_silu
from mcore_ckpt.families.experts import no_experts
from mcore_ckpt.families.fields import Fields, require

table = decoder_table

ABSENT = {"num_key_value_heads": 32}
"""What fields mean that are not there."""


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, absent=ABSENT)
    no_window(fields)
    ours = read_rms_silu(fields) | {"add_qkv_bias": True}
    vocab_size = fields.take("vocab_size")
    fields.finish()
    return gpt(ours, vocab_size)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, qk_layernorm=False, add_bias_linear=False, add_qkv_bias=True)
    require(description, window_size=(-1, 0))
    theirs = {"model_type": "qwen2", **write_rms_silu(description, "Qwen2ForCausalLM")}
    return theirs | {"use_sliding_window": False}


def no_window(fields: Fields) -> None:
    """Use up the fields of a sliding window that is switched off.

    Raises:
        ValueError: if it is on: some layers then have one, which we cannot say.
    """
    fields.must_be("use_sliding_window", False)
    fields.take("sliding_window", 0)
