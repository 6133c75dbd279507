"""GPT-NeoX and Pythia: attention and MLP in parallel, with a norm each."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import (
    OWN_GROUPS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    activation_rule,
    pair,
    with_head,
)
from mcore_ckpt.families.common.fields import Fields, setting
from mcore_ckpt.mapping.rules import Rule, Table

_LAYER = "gpt_neox.layers.*."
_LINEARS = {
    "attention.proj": "attention.dense",
    "mlp.fc1": "mlp.dense_h_to_4h",
    "mlp.fc2": "mlp.dense_4h_to_h",
}


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite old spellings of rotary base and share."""
    usual = {k: v for k, v in config.items() if k not in ("rotary_emb_base", "rotary_pct")}
    rope = config.get("rope_parameters") or {}
    if "partial_rotary_factor" not in rope:
        usual["partial_rotary_factor"] = config.get("rotary_pct") or 0.25
    if "rope_theta" not in rope:
        usual["rope_theta"] = config.get("rotary_emb_base") or 10000.0
    return usual


def _read(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    fields.must_be("is_decoder", False, True)
    is_parallel = fields.take("use_parallel_residual", True)
    return {"parallel_residual": "two_norms" if is_parallel else "off"}


def _write(description: Description, theirs: Theirs) -> Theirs:
    kind = setting(description, "parallel_residual")
    if kind == "one_norm":
        raise ValueError("it cannot express --parallel-residual one_norm")
    rope = theirs["rope_parameters"]
    del theirs["partial_rotary_factor"]
    return {
        "use_parallel_residual": kind == "two_norms",
        "rotary_pct": rope["partial_rotary_factor"],
        "rotary_emb_base": rope["rope_theta"],
    }


def _table(description: Description) -> Table:
    heads = setting(description, "num_attention_heads")
    rules = [Rule("embedding.weight", "gpt_neox.embed_in.weight")]
    for kind in ("weight", "bias"):
        qkv = tuple(f"blocks.*.attention.qkv.{part}.{kind}" for part in "qkv")
        there = f"{_LAYER}attention.query_key_value.{kind}"
        rules += [
            Rule(f"blocks.*.attention_norm.{kind}", f"{_LAYER}input_layernorm.{kind}"),
            Rule(f"blocks.*.mlp_norm.{kind}", f"{_LAYER}post_attention_layernorm.{kind}"),
            Rule(qkv, there, groups=heads),
            *(
                Rule(f"blocks.*.{ours}.{kind}", f"{_LAYER}{theirs}.{kind}")
                for ours, theirs in _LINEARS.items()
            ),
        ]
    rules += [
        Rule(f"final_norm.{kind}", f"gpt_neox.final_layer_norm.{kind}")
        for kind in ("weight", "bias")
    ]
    # Causal masks and rotary angles in old folders.
    unread = (f"{_LAYER}attention.{n}" for n in ("bias", "masked_bias", "rotary_emb.inv_freq"))
    embedding = "gpt_neox.embed_in.weight"
    return with_head(description, rules, embedding, "embed_out.weight", tuple(unread))


FAMILY = Decoder(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fixed={
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    absent={"layer_norm_eps": 1e-5, "max_position_embeddings": 2048},
    only={"attention_bias": True},
    unread=("classifier_dropout",),
    parts=(
        FieldRule(covers=("parallel_residual",), read=_read, write=_write),
        activation_rule("hidden_act", "gelu"),
        OWN_GROUPS,
        pair("hidden_dropout", "hidden_dropout", 0.0),
    ),
    activation=("", ""),
    epsilon="layer_norm_eps",
    partial=0.25,
    normalize=_normalize,
    weights=_table,
)
