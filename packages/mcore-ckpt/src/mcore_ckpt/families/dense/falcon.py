"""Falcon 7B, 40B and 2: attention and MLP in parallel, queries, keys and values in one matrix.

The rows of that matrix are grouped: queries of a group, its key, its value.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import (
    OWN_HEADS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    activation_rule,
    pair,
    with_head,
)
from mcore_ckpt.families.common.fields import Fields, setting, settings
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.logical_tensors import head_dim, num_kv_heads

_LAYER = "transformer.h.*."
_LINEARS = {
    "attention.proj": "self_attention.dense",
    "mlp.fc1": "mlp.dense_h_to_4h",
    "mlp.fc2": "mlp.dense_4h_to_h",
}
_NORMS = {
    "one_norm": {"attention_norm": "input_layernorm"},
    "two_norms": {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"},
    "off": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
}
"""Our norms of a layer and theirs, by ``parallel_residual``."""


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    # The first releases have other names of sizes; three fields determine the number of groups.
    usual = dict(config)
    for old, new in (("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads")):
        if old in usual:
            usual[new] = usual.pop(old)
    heads, groups = usual.get("num_attention_heads"), usual.pop("num_kv_heads", None)
    groups = usual.pop("n_head_kv", groups)
    if not usual.get("new_decoder_architecture", False):
        groups = 1 if usual.get("multi_query", True) else heads
    width = usual.get("intermediate_size") or 4 * usual.get("hidden_size", 0)
    return {**usual, "num_key_value_heads": groups or heads, "intermediate_size": width}


def _read(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    is_new, is_parallel = (
        fields.take("new_decoder_architecture", False),
        fields.take("parallel_attn", True),
    )
    fields.maybe("multi_query")
    norms = fields.maybe("num_ln_in_parallel_attn")
    if is_new:
        return {"parallel_residual": "one_norm" if norms == 1 else "two_norms"}
    return {"parallel_residual": "one_norm" if is_parallel else "off"}


def _write(description: Description, theirs: Theirs) -> Theirs:
    kind, heads = setting(description, "parallel_residual"), theirs["num_attention_heads"]
    groups = theirs.pop("num_key_value_heads")
    is_new = kind == "two_norms" or groups not in (1, heads)
    if is_new and kind == "off":
        raise ValueError(
            f"it cannot express --num-query-groups {groups} with --parallel-residual off"
        )
    fields = {"new_decoder_architecture": is_new, "multi_query": groups == 1}
    fields |= {"parallel_attn": kind != "off", "alibi": False}
    if is_new:
        fields |= {"num_ln_in_parallel_attn": 1 if kind == "one_norm" else 2}
        fields |= {"num_kv_heads": groups}
    return fields


def _table(description: Description) -> Table:
    config = settings(description)
    groups, H = num_kv_heads(config), head_dim(config)
    sizes = (config.num_attention_heads * H, groups * H, groups * H)
    rules = [Rule("embedding.weight", "transformer.word_embeddings.weight")]
    for kind in ("weight", "bias") if config.add_bias_linear else ("weight",):
        qkv = tuple(f"blocks.*.attention.qkv.{part}.{kind}" for part in "qkv")
        there = f"{_LAYER}self_attention.query_key_value.{kind}"
        rules += [
            Rule(qkv, there, sizes=sizes, groups=groups),
            *(
                Rule(f"blocks.*.{ours}.{kind}", f"{_LAYER}{theirs}.{kind}")
                for ours, theirs in _LINEARS.items()
            ),
        ]
    for kind in ("weight", "bias"):
        rules += [
            Rule(f"blocks.*.{ours}.{kind}", f"{_LAYER}{theirs}.{kind}")
            for ours, theirs in _NORMS[config.parallel_residual].items()
        ]
        rules.append(Rule(f"final_norm.{kind}", f"transformer.ln_f.{kind}"))
    return with_head(description, rules, "transformer.word_embeddings.weight")


FAMILY = Decoder(
    model_type="falcon",
    architecture="FalconForCausalLM",
    fixed={"normalization": "LayerNorm"},
    field_names={"intermediate_size": "ffn_hidden_size"},
    absent={
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    refused={"alibi": False, "apply_residual_connection_post_layernorm": False},
    parts=(
        OWN_HEADS,
        FieldRule(covers=("parallel_residual",), read=_read, write=_write),
        activation_rule("activation", "gelu"),
        pair("add_bias_linear", "bias", False),
        pair("hidden_dropout", "hidden_dropout", 0.0),
    ),
    activation=("", ""),
    epsilon="layer_norm_epsilon",
    normalize=_normalize,
    weights=_table,
)
