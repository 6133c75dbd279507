"""Gemma 3, its text model: Gemma 2 with norms on queries and keys, and two rotary bases."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import ATTENTION_BIAS, Description, FieldRule, Theirs
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.common.layer_types import FULL, LOCAL, windows
from mcore_ckpt.families.dense import gemma2

_BASE = "rope_local_base_freq"


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    # transformers ignores the field in this family and does not cap scores.
    normalized = {**config, "attn_logit_softcapping": None}
    nested = config.get("rope_parameters") or {}
    if not {FULL, LOCAL} & nested.keys():
        return normalized
    local_table = dict(nested.get(LOCAL) or {})  # absent or null: the default base, no scaling
    local = local_table.pop("rope_theta", None) or config.get(_BASE)
    if local_table.pop("rope_type", "default") != "default" or local_table:
        raise ValueError(
            f"config.json has rope_parameters[{LOCAL!r}]={nested.get(LOCAL)!r}, which mcore "
            "cannot represent here: only a base (--rotary-base-local)."
        )
    return normalized | {"rope_parameters": nested.get(FULL) or {}, _BASE: local}


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    local = fields.take(_BASE, 0) or 10000.0
    return {"rotary_base_local": float(local)} if ours["window_size"][0] >= 0 else {}


def _write(description: Description, theirs: Theirs) -> Theirs:
    require(description, attn_logit_softcapping=0.0)
    local = setting(description, "rotary_base_local") or setting(description, "rotary_base")
    if theirs["rope_scaling"] is None:
        del theirs["rope_scaling"]
    nested = {
        LOCAL: {"rope_type": "default", "rope_theta": local},
        FULL: theirs["rope_parameters"],
    }
    return {"rope_parameters": nested, _BASE: local}


ROTARY = FieldRule(covers=("rotary_base_local",), read=_read, write=_write)
"""Reads and writes the two rotary bases; scores are not capped."""

FAMILY = replace(
    gemma2.FAMILY,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fixed={**gemma2.FAMILY.fixed, "qk_layernorm": True},
    absent={
        **gemma2.FAMILY.absent,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
    },
    only=gemma2.FAMILY.refused,
    refused={},
    parts=(
        ATTENTION_BIAS,
        gemma2.EMBEDDING,
        gemma2.SCALES,
        windows(6),
        ROTARY,
    ),
    stretched_layers=FULL,
    theta=1e6,
    normalize=_normalize,
)
