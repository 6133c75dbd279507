"""BLOOM: ALiBi, a norm of the embeddings, LayerNorm and biases everywhere."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import (
    FIXED_WIDTH,
    OWN_GROUPS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    pair,
)
from mcore_ckpt.families.common.decoder_rules import below_transformer, with_head
from mcore_ckpt.families.common.fields import require, setting
from mcore_ckpt.mapping.rules import Rule, Table

FIXED: dict[str, Any] = {
    "position_embedding_type": "alibi",
    "normalization": "LayerNorm",
    "swiglu": False,
    "squared_relu": False,
}
"""What all models with ALiBi here are."""
_NAMES = {
    "blocks.*.attention_norm": "h.*.input_layernorm",
    "blocks.*.attention.proj": "h.*.self_attention.dense",
    "blocks.*.mlp_norm": "h.*.post_attention_layernorm",
    "blocks.*.mlp.fc1": "h.*.mlp.dense_h_to_4h",
    "blocks.*.mlp.fc2": "h.*.mlp.dense_4h_to_h",
    "embedding_norm": "word_embeddings_layernorm",
    "final_norm": "ln_f",
}


def _stated(config: Mapping[str, Any]) -> dict[str, Any]:
    stated = dict(config)
    if "n_embed" in stated:
        stated["hidden_size"] = stated.pop("n_embed")
    return {**stated, "intermediate_size": 4 * stated.get("hidden_size", 0)}


def _write_no_limit(description: Description, theirs: Theirs) -> Theirs:
    require(description, max_position_embeddings=0)
    del theirs["max_position_embeddings"]
    return {}


def _table(description: Description) -> Table:
    rules = [Rule("embedding.weight", "transformer.word_embeddings.weight")]
    for kind in ("weight", "bias"):
        qkv = tuple(f"blocks.*.attention.qkv.{part}.{kind}" for part in "qkv")
        there = f"transformer.h.*.self_attention.query_key_value.{kind}"
        rules.append(Rule(qkv, there, groups=setting(description, "num_attention_heads")))
        rules += [
            Rule(f"{ours}.{kind}", f"transformer.{theirs}.{kind}")
            for ours, theirs in _NAMES.items()
        ]
    return with_head(description, rules, "transformer.word_embeddings.weight")


FAMILY = Decoder(
    model_type="bloom",
    architecture="BloomForCausalLM",
    fixed={**FIXED, "openai_gelu": True, "add_bias_linear": True, "embedding_layernorm": True},
    words={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    rotates=False,
    absent={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
    refused={"apply_residual_connection_post_layernorm": False},
    unread=(
        *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"),
        *("n_inner", "offset_alibi", "seq_length", "skip_bias_add", "skip_bias_add_qkv"),
        "slow_but_exact",
    ),
    parts=(
        OWN_GROUPS,
        FIXED_WIDTH,
        FieldRule(write=_write_no_limit),
        pair("hidden_dropout", "hidden_dropout", 0.0),
    ),
    activation=("", ""),
    epsilon="layer_norm_epsilon",
    stated=_stated,
    weights=_table,
    renames=below_transformer,
)
