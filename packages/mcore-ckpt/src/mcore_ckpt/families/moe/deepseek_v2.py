"""DeepSeek-V2 and V2-Lite: latent attention, softmax routing, shared experts.

Where experts are chosen by groups, a group counts by its best one.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.experts import expert_setting
from mcore_ckpt.families.common.fields import Fields, require
from mcore_ckpt.families.moe import deepseek_v3
from mcore_ckpt.families.moe.deepseek_v3 import read, write

_ABSENT = {"n_shared_experts": 2, "q_lora_rank": 1536}
_BY_GROUPS = "group_limited_greedy"

table = deepseek_v3.table


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description; see ``families``."""
    fields = Fields(config, absent=_ABSENT)
    fields.must_be("scoring_func", "softmax")
    # Their model does not look at it, whatever it says.
    fields.must_be("norm_topk_prob", False)
    method = fields.take("topk_method", "greedy")
    groups = {
        "moe_router_num_groups": fields.take("n_group", 0),
        "moe_router_group_topk": fields.take("topk_group", 0),
        "moe_router_group_score_topk": 1,
    }
    if method not in ("greedy", _BY_GROUPS):
        raise ValueError(
            f"config.json has topk_method={method!r}, which mcore cannot represent here: only "
            f"'greedy' and {_BY_GROUPS!r}."
        )
    ours, moe = read(fields, interleaved=True)
    moe |= {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        **(groups if method == _BY_GROUPS else {}),
    }
    return fields.described(ours, moe)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json; see ``families``."""
    theirs = write(description, "deepseek_v2", "DeepseekV2ForCausalLM")
    require(description, rotary_interleaved=True, mtp_num_layers=0)
    topk, groups, kept, scored, score, is_before = (
        expert_setting(description, f"moe_router_{name}")
        for name in (
            *("topk", "num_groups", "group_topk", "group_score_topk", "score_function"),
            "pre_softmax",
        )
    )
    if score != "softmax" or not is_before:
        raise ValueError("it cannot express experts but with --moe-router-pre-softmax")
    if kept and (scored or topk // kept) != 1:
        raise ValueError(
            "it cannot express groups of experts but with --moe-router-group-score-topk 1"
        )
    return theirs | {
        "scoring_func": "softmax",
        "topk_method": _BY_GROUPS if kept else "greedy",
        "norm_topk_prob": False,
        "n_group": groups or None,
        "topk_group": kept or None,
    }
