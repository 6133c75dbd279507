"""Llama 2, 3, 3.1, 3.2 and whatever calls itself ``llama``."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import decoder_table, read_rms_silu, write_rms_silu
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require, setting

table = decoder_table


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config)
    biased, mlp = fields.take("attention_bias", False), fields.take("mlp_bias", False)
    if mlp and not biased:
        raise ValueError(
            "config.json has attention_bias=False and mlp_bias=True: mcore has biases in all "
            "linears (--add-bias-linear), in attention's (--add-attention-bias), or in none."
        )
    ours = read_rms_silu(fields) | {"add_bias_linear": mlp}
    if biased and not mlp:
        ours["add_attention_bias"] = True
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    biased = setting(description, "add_bias_linear")
    require(description, qk_layernorm=False, window_size=(-1, 0))
    has_bias = biased or setting(description, "add_attention_bias")
    if not has_bias:
        require(description, add_qkv_bias=False)
    theirs = write_rms_silu(description, "LlamaForCausalLM", says=("add_attention_bias",))
    heads, hidden = theirs["num_attention_heads"], theirs["hidden_size"]
    if hidden % heads:
        raise ValueError(f"it cannot say --hidden-size {hidden}: no multiple of {heads} heads")
    return {"model_type": "llama", **theirs, "attention_bias": has_bias, "mlp_bias": biased}
