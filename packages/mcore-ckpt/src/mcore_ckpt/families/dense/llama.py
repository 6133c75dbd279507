"""Llama 2, 3, 3.1, 3.2 and other models with the type ``llama``."""

from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import (
    Decoder,
    Description,
    FieldRule,
    Theirs,
    activation_rule,
)
from mcore_ckpt.families.common.fields import Fields, require, setting


def _read(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    biased, mlp = fields.take("attention_bias", False), fields.take("mlp_bias", False)
    if mlp and not biased:
        raise ValueError(
            "config.json has attention_bias=False and mlp_bias=True: mcore has biases in all "
            "linears (--add-bias-linear), in attention's (--add-attention-bias), or in none."
        )
    ours = {"add_bias_linear": mlp}
    return ours | ({"add_attention_bias": True} if biased and not mlp else {})


def _write_biases(description: Description, _: Theirs) -> Theirs:
    mlp = setting(description, "add_bias_linear")
    biased = mlp or setting(description, "add_attention_bias")
    if not biased:
        require(description, add_qkv_bias=False)
    return {"attention_bias": biased, "mlp_bias": mlp}


def _write(description: Description, theirs: Theirs) -> Theirs:
    heads, hidden = theirs["num_attention_heads"], theirs["hidden_size"]
    if hidden % heads:
        raise ValueError(
            f"it cannot express --hidden-size {hidden}: only multiples of {heads} heads"
        )
    return _write_biases(description, theirs)


BIASES = FieldRule(
    covers=("add_bias_linear", "add_attention_bias", "add_qkv_bias"),
    read=_read,
    write=_write_biases,
)
"""Biases in all linears, in those of attention, or in none."""

FAMILY = Decoder(
    model_type="llama",
    architecture="LlamaForCausalLM",
    parts=(
        replace(BIASES, write=_write),
        activation_rule("hidden_act", "silu", gated=True),
    ),
    activation=("", ""),
)
