"""MPT: ALiBi, LayerNorm without bias, no biases, GELU."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import (
    FIXED_WIDTH,
    OWN_GROUPS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
)
from mcore_ckpt.families.common.decoder_rules import with_head
from mcore_ckpt.families.common.fields import Fields, setting
from mcore_ckpt.families.dense.bloom import FIXED
from mcore_ckpt.mapping.rules import Rule, Table

_NAMES = {
    "embedding": "wte",
    "blocks.*.attention_norm": "blocks.*.norm_1",
    "blocks.*.attention.proj": "blocks.*.attn.out_proj",
    "blocks.*.mlp_norm": "blocks.*.norm_2",
    "blocks.*.mlp.fc1": "blocks.*.ffn.up_proj",
    "blocks.*.mlp.fc2": "blocks.*.ffn.down_proj",
    "final_norm": "norm_f",
}
_LIMIT = 2048


def _stated(config: Mapping[str, Any]) -> dict[str, Any]:
    attention = dict(config.get("attn_config") or {})
    attention.pop("model_type", None)
    flat = {name: value for name, value in config.items() if name != "attn_config"}
    return {**flat, **attention, "intermediate_size": 4 * config.get("hidden_size", 0)}


def _read(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    return {"softmax_scale": fields.maybe("softmax_scale") or 0.0}


def _write(description: Description, theirs: Theirs) -> Theirs:
    del theirs["attention_dropout"]
    scale = setting(description, "softmax_scale")
    return {
        "max_position_embeddings": setting(description, "max_position_embeddings") or _LIMIT,
        "attn_config": {"softmax_scale": scale} if scale else {},
    }


def _table(description: Description) -> Table:
    qkv = tuple(f"blocks.*.attention.qkv.{part}.weight" for part in "qkv")
    rules = [Rule(qkv, "transformer.blocks.*.attn.Wqkv.weight")]
    rules += [
        Rule(f"{ours}.weight", f"transformer.{theirs}.weight")
        for ours, theirs in _NAMES.items()
    ]
    return with_head(description, rules, "transformer.wte.weight")


FAMILY = Decoder(
    model_type="mpt",
    architecture="MptForCausalLM",
    fixed={
        **FIXED,
        **dict.fromkeys(("openai_gelu", "add_bias_linear", "norm_bias"), False),
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
    },
    words={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    },
    rotates=False,
    absent={
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": _LIMIT,
    },
    refused={
        "attn_type": "multihead_attention",
        "alibi": True,
        "alibi_bias_max": 8,
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "emb_pdrop"), 0.0),
        **dict.fromkeys(("prefix_lm", "qk_ln", "attn_uses_sequence_id"), False),
        **dict.fromkeys(("clip_qkv", "logit_scale")),
        "expansion_ratio": 4,
        "no_bias": True,
    },
    # How their code computes and begins, and what it does not read.
    unread=(
        *("attn_impl", "init_config", "init_device", "learned_pos_emb"),
        *("embedding_fraction", "norm_type", "verbose", "tokenizer_name"),
    ),
    parts=(
        OWN_GROUPS,
        FIXED_WIDTH,
        FieldRule(says=("softmax_scale",), read=_read, write=_write),
    ),
    activation=("", ""),
    epsilon="layer_norm_epsilon",
    stated=_stated,
    weights=_table,
)
