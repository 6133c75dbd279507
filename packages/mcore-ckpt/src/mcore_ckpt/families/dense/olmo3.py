"""OLMo-3: OLMo-2 with windows in three of four layers, whose positions are not stretched."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import read_rms_silu
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.common.layer_types import FULL, LOCAL, read_windows, write_windows
from mcore_ckpt.families.dense.olmo2 import ABSENT, FIXED, table, write_olmo

__all__ = ["table", "to_ours", "to_theirs"]


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    stated, nested = dict(config), config.get("rope_parameters") or {}
    local: Mapping[str, Any] = {}
    if FULL in nested:
        # transformers looks for this switch of YaRN's outside of the tables by layer.
        full = {name: value for name, value in nested[FULL].items() if name != "truncate"}
        stated["rope_parameters"], local = full, nested[LOCAL]
    fields = Fields(stated, keep=("layer_types",), absent={**ABSENT, "sliding_window": 4096})
    ours = read_rms_silu(fields, theta=5e5) | FIXED
    ours["add_attention_bias"] = fields.take("attention_bias", False)
    ours |= read_windows(fields, ours["num_layers"], 4)
    if ours["window_size"][0] >= 0:
        ours["rotary_base_local"] = float(local.get("rope_theta", ours["rotary_base"]))
    if local.get("rope_type", "default") != "default":
        raise ValueError(
            f"config.json has rope_parameters[{LOCAL!r}]={local!r}, which mcore cannot "
            "represent here: only a base (--rotary-base-local)."
        )
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    require(description, yarn_correction_range_round_to_int=True)
    says = ("rotary_base_local", "window_attn_skip_freq")
    theirs = write_olmo(description, "Olmo3ForCausalLM", says)
    local = setting(description, "rotary_base_local") or setting(description, "rotary_base")
    theirs["rope_parameters"].pop("truncate", None)
    theirs["rope_parameters"] = {
        LOCAL: {"rope_type": "default", "rope_theta": local},
        FULL: theirs["rope_parameters"],
    }
    del theirs["rope_scaling"]
    return {"model_type": "olmo3", **theirs, **write_windows(description)}
