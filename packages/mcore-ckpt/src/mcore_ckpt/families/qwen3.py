"""Qwen3: Llama with a norm on each head's queries and keys."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.decoder import (
    ANGLES,
    Fields,
    around,
    attention_rules,
    mlp_rules,
    qk_norm_rules,
    read_common,
    require,
    setting,
    tied_copies,
    write_common,
)
from mcore_ckpt.families.llama import no_experts
from mcore_ckpt.families.qwen2 import no_window
from mcore_ckpt.rules import Table


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config)
    no_window(fields)
    fields.must_be("attention_bias", False)
    # Qwen3 sets 128 where the field is absent, whatever the hidden size.
    head_dim = config.get("head_dim") or 128
    ours = read_common(fields) | {"qk_layernorm": True, "kv_channels": head_dim}
    vocab_size = fields.take("vocab_size")
    fields.finish()
    return {"family": "gpt", "vocab_size": vocab_size, "config": ours, "moe": {}}


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, qk_layernorm=True, add_bias_linear=False, add_qkv_bias=False)
    require(description, window_size=(-1, 0))
    theirs = {"model_type": "qwen3", **write_common(description, "Qwen3ForCausalLM")}
    return theirs | {"use_sliding_window": False, "attention_bias": False}


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    return Table(
        around(description, [*attention_rules(), *qk_norm_rules(), *mlp_rules()]),
        setting(description, "num_layers"),
        droppable=ANGLES,
        copies=tied_copies(description),
    )
