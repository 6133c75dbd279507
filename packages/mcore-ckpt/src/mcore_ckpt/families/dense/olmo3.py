"""OLMo-3: OLMo-2 with windows in three of four layers, whose positions are not stretched."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import Description, FieldRule, Theirs
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.common.layer_types import FULL, LOCAL, windows
from mcore_ckpt.families.dense import olmo2

_LOCAL_THETA = "base of layers with a window"


def _stated(config: Mapping[str, Any]) -> dict[str, Any]:
    stated, nested = dict(config), config.get("rope_parameters") or {}
    if FULL not in nested:
        return stated
    # transformers looks for this switch of YaRN's outside of the tables by layer.
    full = {name: value for name, value in nested[FULL].items() if name != "truncate"}
    local = nested[LOCAL]
    if local.get("rope_type", "default") != "default":
        raise ValueError(
            f"config.json has rope_parameters[{LOCAL!r}]={local!r}, which mcore cannot "
            "represent here: only a base (--rotary-base-local)."
        )
    return stated | {"rope_parameters": full, _LOCAL_THETA: local.get("rope_theta")}


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    local = fields.take(_LOCAL_THETA, ours["rotary_base"])
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
        FieldRule(says=("rotary_base_local",), read=_read, write=_write),
    ),
    theta=5e5,
    stated=_stated,
)
