"""OLMo-3: OLMo-2 with windows in three of four layers, whose rotary positions are unscaled."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import Description, FieldRule, Theirs
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.common.layer_types import FULL, LOCAL, windows
from mcore_ckpt.families.dense import olmo2

_LOCAL_THETA = "base of layers with a window"
_THETA = 5e5


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    nested, base = config.get("rope_parameters") or {}, config.get("rope_theta")
    local = nested.get(LOCAL) or {}
    if local.get("rope_type", "default") != "default":
        raise ValueError(
            f"config.json has rope_parameters[{LOCAL!r}]={local!r}, which mcore cannot "
            "represent here: only a base (--rotary-base-local)."
        )
    if "rope_theta" not in local and base not in (None, _THETA):
        raise ValueError(
            f"config.json has rope_theta={base!r}: in layers with a window transformers 4 uses "
            f"this base, transformers 5 uses {_THETA!r}. Write a base for each kind of layer "
            f"into rope_parameters[{LOCAL!r}] and rope_parameters[{FULL!r}]."
        )
    # transformers reads this switch of YaRN's outside of the tables by layer type.
    full = {name: v for name, v in (nested.get(FULL) or {}).items() if name != "truncate"}
    local_base = local.get("rope_theta", _THETA)
    return {**config, "rope_parameters": full, _LOCAL_THETA: local_base}


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    local = fields.take(_LOCAL_THETA)
    return {"rotary_base_local": float(local)} if ours["window_size"][0] >= 0 else {}


def _write(description: Description, theirs: Theirs) -> Theirs:
    require(description, yarn_correction_range_round_to_int=True)
    local = setting(description, "rotary_base_local") or setting(description, "rotary_base")
    full = theirs["rope_parameters"]
    full.pop("truncate", None)
    del theirs["rope_scaling"]
    return {
        "rope_parameters": {LOCAL: {"rope_type": "default", "rope_theta": local}, FULL: full}
    }


FAMILY = replace(
    olmo2.FAMILY,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    absent={**olmo2.FAMILY.absent, "sliding_window": 4096},
    parts=(
        *olmo2.FAMILY.parts,
        windows(4),
        FieldRule(covers=("rotary_base_local",), read=_read, write=_write),
    ),
    stretched_layers=FULL,
    theta=_THETA,
    normalize=_normalize,
)
