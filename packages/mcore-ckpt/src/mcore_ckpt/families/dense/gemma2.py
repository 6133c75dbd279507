"""Gemma 2: norms before and after each half, gains stored minus one, capped logits."""

import math
from functools import partial
from typing import Any

from mcore_ckpt.families.common.decoder import (
    ATTENTION_BIAS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    decoder_table,
)
from mcore_ckpt.families.common.fields import Fields, setting
from mcore_ckpt.families.common.layer_types import windows

_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _read_width(_: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    return {"embedding_multiplier": math.sqrt(ours["hidden_size"])}


def _write_width(description: Description, theirs: Theirs) -> Theirs:
    width = math.sqrt(theirs["hidden_size"])
    if not math.isclose(setting(description, "embedding_multiplier"), width):
        raise ValueError(f"it cannot express --embedding-multiplier other than {width}")
    return {}


EMBEDDING = FieldRule(says=("embedding_multiplier",), read=_read_width, write=_write_width)
"""The factor on embeddings, which is implied by the hidden size."""


def _read(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    return {
        "softmax_scale": fields.take("query_pre_attn_scalar") ** -0.5,
        **{name: fields.maybe(name) or 0.0 for name in _CAPS},
    }


def _write(description: Description, theirs: Theirs) -> Theirs:
    scale = setting(description, "softmax_scale")
    scalar = round(scale**-2, 9) if scale else theirs["head_dim"]
    return {
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        **{name: setting(description, name) or None for name in _CAPS},
    }


SCALES = FieldRule(says=("softmax_scale", *_CAPS), read=_read, write=_write)
"""The factor on scores, and caps on scores and logits."""

FAMILY = Decoder(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fixed={
        "normalization": "RMSNorm",
        "apply_layernorm_1p": True,
        "norm_placement": "sandwich",
        "swiglu": False,
        "geglu": True,
    },
    absent={
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
    refused={"use_bidirectional_attention": False},
    # The first release has another activation in hidden_act, which transformers ignores.
    unread=("hidden_act", "cache_implementation"),
    parts=(ATTENTION_BIAS, EMBEDDING, SCALES, windows(2)),
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    weights=partial(decoder_table, norms=_NORMS),
)
