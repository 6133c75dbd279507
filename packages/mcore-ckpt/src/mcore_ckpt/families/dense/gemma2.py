"""Gemma 2: norms before and after each half, gains stored minus one, capped logits."""

import math
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import decoder_table, read_common, write_common
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.common.layer_types import read_windows, write_windows
from mcore_ckpt.mapping.rules import Table

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""Our norms and theirs."""

FIXED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "apply_layernorm_1p": True,
    "norm_placement": "sandwich",
    "swiglu": False,
    "geglu": True,
}
"""What all Gemmas have."""

ABSENT = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
}
"""What fields mean that are not there."""

SAYS = (
    *("norm_placement", "geglu", "softmax_scale", "attn_logit_softcapping"),
    *("final_logit_softcapping", "embedding_multiplier", "window_attn_skip_freq"),
)
"""Our fields that Gemmas have beside those of all families."""


def read_gemma(fields: Fields, *, every: int, theta: float = 10000.0) -> dict[str, Any]:
    """Read what all Gemmas say alike.

    Args:
        fields: of the config.json.
        every: every so many-th layer has no window where nothing is said.
        theta: rotary base where none is said.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields.must_be("hidden_activation", "gelu_pytorch_tanh")
    # The first release wrote another activation here, which nothing reads.
    fields.maybe("hidden_act")
    fields.must_be("use_bidirectional_attention", False)
    fields.maybe("cache_implementation")
    ours = read_common(fields, theta=theta) | FIXED
    return ours | {
        "add_attention_bias": fields.take("attention_bias", False),
        "embedding_multiplier": math.sqrt(ours["hidden_size"]),
        "softmax_scale": fields.take("query_pre_attn_scalar") ** -0.5,
        "attn_logit_softcapping": fields.maybe("attn_logit_softcapping") or 0.0,
        "final_logit_softcapping": fields.maybe("final_logit_softcapping") or 0.0,
        **read_windows(fields, ours["num_layers"], every),
    }


def write_gemma(
    description: Mapping[str, Any], architecture: str, says: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Write what all Gemmas say alike.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, **FIXED, add_bias_linear=False, add_qkv_bias=False)
    theirs = write_common(description, architecture, says=(*SAYS, "add_attention_bias", *says))
    width = math.sqrt(theirs["hidden_size"])
    if not math.isclose(setting(description, "embedding_multiplier"), width):
        raise ValueError(f"it cannot say --embedding-multiplier other than {width}")
    scale = setting(description, "softmax_scale")
    scalar = round(scale**-2, 9) if scale else theirs["head_dim"]
    del theirs["hidden_act"]
    return theirs | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": setting(description, "add_attention_bias"),
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": setting(description, "attn_logit_softcapping") or None,
        "final_logit_softcapping": setting(description, "final_logit_softcapping") or None,
        **write_windows(description),
    }


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, keep=("layer_types",), absent=ABSENT)
    ours = read_gemma(fields, every=2)
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    require(description, qk_layernorm=False)
    return {"model_type": "gemma2", **write_gemma(description, "Gemma2ForCausalLM")}


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    return decoder_table(description, norms=NORMS)
