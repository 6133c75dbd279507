"""DeepSeek-V2 and V2-Lite: latent attention, softmax routing, shared experts.

No model here runs it yet, and routing differs from Megatron's: a group of experts counts by
its best one.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families import deepseek_v3
from mcore_ckpt.families.deepseek_v3 import read, write
from mcore_ckpt.families.fields import Fields

_ABSENT = {"n_shared_experts": 2}

table = deepseek_v3.table
shapes = deepseek_v3.shapes


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, absent=_ABSENT)
    fields.must_be("scoring_func", "softmax")
    described = read(fields, "deepseek_v2")
    described["config"]["topk_method"] = fields.take("topk_method", "greedy")
    described["moe"] |= {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not fields.take("norm_topk_prob", False),
    }
    fields.finish()
    return described


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: if it is of another family.
    """
    theirs = write(description, "deepseek_v2", "DeepseekV2ForCausalLM")
    moe = description["moe"]
    return theirs | {
        "scoring_func": "softmax",
        "topk_method": description["config"]["topk_method"],
        "norm_topk_prob": not moe["moe_router_pre_softmax"],
        "n_group": moe["moe_router_num_groups"] or None,
        "topk_group": moe["moe_router_group_topk"] or None,
    }
