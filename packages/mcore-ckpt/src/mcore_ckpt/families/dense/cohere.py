"""Command-R: one LayerNorm without a bias, read by attention and MLP in parallel."""

from functools import partial
from typing import Any

from mcore_ckpt.families.common.decoder import (
    ATTENTION_BIAS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    decoder_table,
    pair,
)
from mcore_ckpt.families.common.fields import Fields, setting


def _read_norms(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    if not fields.take("use_qk_norm", False):
        return {}
    return {"qk_layernorm": True, "qk_norm_width": "own_head"}


def _write_norms(description: Description, _: Theirs) -> Theirs:
    is_normed, width = (setting(description, x) for x in ("qk_layernorm", "qk_norm_width"))
    if is_normed and width != "own_head":
        raise ValueError(f"it cannot express --qk-norm-width {width}")
    return {"use_qk_norm": is_normed}


PARTS = (pair("logits_multiplier", "logit_scale", kind=float), ATTENTION_BIAS)

FAMILY = Decoder(
    model_type="cohere",
    architecture="CohereForCausalLM",
    fixed={
        "normalization": "LayerNorm",
        "norm_bias": False,
        "parallel_residual": "one_norm",
        "rotary_interleaved": True,
    },
    absent={"logit_scale": 0.0625, "tie_word_embeddings": True, "layer_norm_eps": 1e-5},
    parts=(
        *PARTS,
        FieldRule(says=("qk_layernorm", "qk_norm_width"), read=_read_norms, write=_write_norms),
    ),
    epsilon="layer_norm_eps",
    theta=5e5,
    weights=partial(decoder_table, norms={"attention_norm": "input_layernorm"}),
)
