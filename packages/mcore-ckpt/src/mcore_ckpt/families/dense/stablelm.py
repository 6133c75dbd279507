"""StableLM: LayerNorm, part of each head rotated, halves in sequence or side by side."""

from typing import Any

from mcore_ckpt.families.common.decoder import (
    OWN_HEADS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    pair,
)
from mcore_ckpt.families.common.decoder_rules import NORMS, decoder_table
from mcore_ckpt.families.common.fields import Fields, setting
from mcore_ckpt.mapping.rules import Table


def _read(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    is_parallel = fields.take("use_parallel_residual", False)
    return {"parallel_residual": "one_norm"} if is_parallel else {}


def _write(description: Description, _: Theirs) -> Theirs:
    kind = setting(description, "parallel_residual")
    if kind == "two_norms":
        raise ValueError("it cannot express --parallel-residual two_norms")
    return {"use_parallel_residual": kind == "one_norm"}


def _table(description: Description) -> Table:
    is_parallel = setting(description, "parallel_residual") == "one_norm"
    first = {"attention_norm": NORMS["attention_norm"]}
    return decoder_table(description, norms=first if is_parallel else NORMS)


FAMILY = Decoder(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    fixed={"normalization": "LayerNorm"},
    absent={"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "max_position_embeddings": 4096},
    # Norms of each head have weights of its own there, and one half alone drops channels.
    only={"qk_layernorm": False, "hidden_dropout": 0.0},
    parts=(
        pair("add_qkv_bias", "use_qkv_bias", False),
        FieldRule(says=("parallel_residual",), read=_read, write=_write),
        OWN_HEADS,
    ),
    epsilon="layer_norm_eps",
    partial=0.25,
    weights=_table,
)
