"""Llama 2, 3, 3.1, 3.2 and whatever calls itself ``llama``."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.decoder import decoder_table, gpt, read_rms_silu, write_rms_silu
from mcore_ckpt.families.experts import no_experts
from mcore_ckpt.families.fields import Fields, require, setting

table = decoder_table


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config)
    biased = fields.take("attention_bias", False)
    if fields.take("mlp_bias", False) != biased:
        raise ValueError(
            f"config.json has attention_bias={biased} and mlp_bias={not biased}: mcore has "
            "biases in all linears or in none (--add-bias-linear)."
        )
    ours = read_rms_silu(fields) | {"add_bias_linear": biased}
    vocab_size = fields.take("vocab_size")
    fields.finish()
    return gpt(ours, vocab_size)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    biased = setting(description, "add_bias_linear")
    require(description, qk_layernorm=False, window_size=(-1, 0))
    if not biased:
        require(description, add_qkv_bias=False)
    theirs = {"model_type": "llama", **write_rms_silu(description, "LlamaForCausalLM")}
    return theirs | {"attention_bias": biased, "mlp_bias": biased}
