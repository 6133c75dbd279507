"""Gemma 3, its text model: Gemma 2 with norms on queries and keys, and two rotary bases."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.common.layer_types import FULL, LOCAL
from mcore_ckpt.families.dense.gemma2 import ABSENT, read_gemma, table, write_gemma

__all__ = ["table", "to_ours", "to_theirs"]

_ABSENT = ABSENT | {
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    local = config.get("rope_local_base_freq") or 10000.0
    stated = {name: v for name, v in config.items() if name != "rope_local_base_freq"}
    nested = config.get("rope_parameters") or {}
    if FULL in nested:
        other = dict(nested[LOCAL])
        local = other.pop("rope_theta", local)
        if other.pop("rope_type", "default") != "default" or other:
            raise ValueError(
                f"config.json has rope_parameters[{LOCAL!r}]={nested[LOCAL]!r}, which mcore "
                "cannot represent here: only a base (--rotary-base-local)."
            )
        stated["rope_parameters"] = nested[FULL]
    fields = Fields(stated, keep=("layer_types",), absent=_ABSENT)
    # transformers does not cap this family's scores, whatever the field says.
    fields.maybe("attn_logit_softcapping")
    ours = read_gemma(fields, every=6, theta=1e6) | {"qk_layernorm": True}
    if ours["window_size"][0] >= 0:
        ours["rotary_base_local"] = float(local)
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    require(description, qk_layernorm=True, attn_logit_softcapping=0.0)
    says = ("rotary_base_local", "qk_norm_width")
    theirs = write_gemma(description, "Gemma3ForCausalLM", says)
    require(description, qk_norm_width="head")
    local = setting(description, "rotary_base_local") or setting(description, "rotary_base")
    nested = {
        LOCAL: {"rope_type": "default", "rope_theta": local},
        FULL: theirs["rope_parameters"],
    }
    theirs |= {"rope_parameters": nested, "rope_local_base_freq": local}
    if theirs["rope_scaling"] is None:
        del theirs["rope_scaling"]
    return {"model_type": "gemma3_text", **theirs, "use_bidirectional_attention": False}
