"""SmolLM3: Llama whose every fourth layer rotates nothing."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import decoder_table, read_rms_silu, write_rms_silu
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.common.layer_types import read_skipped, write_pattern
from mcore_ckpt.families.dense.qwen2 import no_window

table = decoder_table

_ABSENT = {"num_key_value_heads": 4, "tie_word_embeddings": True, "no_rope_layer_interval": 4}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, absent=_ABSENT)
    no_window(fields)
    fields.must_be("mlp_bias", False)
    ours = read_rms_silu(fields, theta=2e6)
    ours["add_attention_bias"] = fields.take("attention_bias", False)
    interval = fields.take("no_rope_layer_interval")
    rotated = fields.maybe("no_rope_layers")  # 1 stands for rotation
    if rotated is None:
        rotated = [(layer + 1) % interval != 0 for layer in range(ours["num_layers"])]
    ours["rope_skip_freq"] = write_pattern([not has for has in rotated])
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, qk_layernorm=False, add_bias_linear=False, add_qkv_bias=False)
    require(description, window_size=(-1, 0))
    says = ("rope_skip_freq", "add_attention_bias")
    theirs = write_rms_silu(description, "SmolLM3ForCausalLM", says=says)
    skipped = read_skipped(description, "rope_skip_freq")
    return theirs | {
        "model_type": "smollm3",
        "attention_bias": setting(description, "add_attention_bias"),
        "mlp_bias": False,
        "no_rope_layers": [int(not skip) for skip in skipped],
        "use_sliding_window": False,
    }
