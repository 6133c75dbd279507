"""OPT and Galactica: learned positions that begin at the third row of their table, ReLU."""

from collections.abc import Collection
from typing import Any

from mcore_ckpt.families.common.decoder import (
    FIXED_EPSILON,
    OWN_GROUPS,
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
from mcore_models.logical_tensors import norm_kinds

_LAYER = "model.decoder.layers.*."
_NORMS = {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}
_LINEARS = {
    **{f"attention.qkv.{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attention.proj": "self_attn.out_proj",
    "mlp.fc1": "fc1",
    "mlp.fc2": "fc2",
}


def _read_width(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    # Embeddings have the width of the model: there is no projection between two widths.
    fields.must_be("word_embed_proj_dim", ours["hidden_size"])
    return {}


def _write_width(_: Description, theirs: Theirs) -> Theirs:
    return {"word_embed_proj_dim": theirs["hidden_size"]}


def _table(description: Description) -> Table:
    rules = [
        Rule("embedding.weight", "model.decoder.embed_tokens.weight"),
        Rule("position_embedding.weight", "model.decoder.embed_positions.weight"),
    ]
    for kind in ("weight", "bias") if setting(description, "add_bias_linear") else ("weight",):
        rules += [
            Rule(f"blocks.*.{ours}.{kind}", f"{_LAYER}{theirs}.{kind}")
            for ours, theirs in _LINEARS.items()
        ]
    kinds = norm_kinds(settings(description))
    rules += [
        Rule(f"blocks.*.{ours}.{kind}", f"{_LAYER}{theirs}.{kind}")
        for ours, theirs in _NORMS.items()
        for kind in kinds
    ]
    last = "model.decoder.final_layer_norm"
    rules += [Rule(f"final_norm.{kind}", f"{last}.{kind}") for kind in kinds]
    return with_head(description, rules, "model.decoder.embed_tokens.weight")


def _renames(names: Collection[str]) -> dict[str, str]:
    """Map the names of published folders, which begin with ``decoder.``."""
    return {name: f"model.{name}" for name in names if name.startswith("decoder.")}


FAMILY = Decoder(
    model_type="opt",
    architecture="OPTForCausalLM",
    fixed={
        "position_embedding_type": "learned_absolute",
        "position_embedding_offset": 2,
        "normalization": "LayerNorm",
    },
    field_names={"intermediate_size": "ffn_dim", "initializer_range": "init_std"},
    rotates=False,
    absent={"layer_norm_eps": 1e-5, "tie_word_embeddings": True},
    only={"do_layer_norm_before": True},
    refused={"_remove_final_layer_norm": False, "layerdrop": 0.0},
    unread=("activation_dropout", "prefix"),
    parts=(
        FieldRule(read=_read_width, write=_write_width),
        OWN_GROUPS,
        FIXED_EPSILON,
        activation_rule("activation_function", "relu"),
        pair("add_bias_linear", "enable_bias", True),
        pair("norm_weight", "layer_norm_elementwise_affine", True),
        # transformers applies no dropout to embeddings.
        pair("hidden_dropout", "dropout", 0.1),
    ),
    activation=("", ""),
    epsilon="layer_norm_eps",
    weights=_table,
    renames=_renames,
)
