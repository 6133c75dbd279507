"""Qwen3: Llama with a norm on each head's queries and keys."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import decoder_table, read_rms_silu, write_rms_silu
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.dense.qwen2 import ABSENT, read_upper_windows, write_upper_windows

table = decoder_table


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, keep=("layer_types", "max_window_layers"), absent=ABSENT)
    biased = fields.take("attention_bias", False)
    # Qwen3 sets 128 where the field is absent, whatever the hidden size.
    head_dim = config.get("head_dim") or 128
    ours = read_rms_silu(fields) | {"qk_layernorm": True, "kv_channels": head_dim}
    ours |= read_upper_windows(fields, ours["num_layers"])
    if biased:
        ours["add_attention_bias"] = True
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, qk_layernorm=True, add_bias_linear=False, add_qkv_bias=False)
    says = ("window_attn_skip_freq", "add_attention_bias")
    theirs = write_rms_silu(description, "Qwen3ForCausalLM", says=says)
    theirs["attention_bias"] = setting(description, "add_attention_bias")
    return {"model_type": "qwen3", **theirs, **write_upper_windows(description)}
