"""DeepSeek-V2 and V2-Lite: latent attention, softmax routing, shared experts.

If experts are chosen by groups, the score of a group is the score of its best expert.
"""

from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import Description, FieldRule, Theirs
from mcore_ckpt.families.common.fields import Fields, expert_setting, require_routing
from mcore_ckpt.families.moe import deepseek_v3
from mcore_ckpt.families.moe.deepseek_v3 import LATENT, read_experts, write_experts

_BY_GROUPS = "group_limited_greedy"
_ROUTING = {
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": True,
    "moe_router_enable_expert_bias": False,
    "moe_router_bias": False,
    "moe_apply_probs_on_input": False,
    "moe_shared_expert_gate": False,
}


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
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
    return {
        **read_experts(fields, ours),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        **(groups if method == _BY_GROUPS else {}),
    }


def _write(description: Description, _: Theirs) -> Theirs:
    require_routing(description, _ROUTING)
    kept = expert_setting(description, "moe_router_group_topk")
    return write_experts(description, 1) | {
        "topk_method": _BY_GROUPS if kept else "greedy",
        "n_group": expert_setting(description, "moe_router_num_groups") or None,
        "topk_group": kept or None,
    }


FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    fixed={**deepseek_v3.FAMILY.fixed, "rotary_interleaved": True},
    absent={"max_position_embeddings": 4096, "n_shared_experts": 2, "q_lora_rank": 1536},
    only={"scoring_func": "softmax", "attention_bias": False},
    # transformers ignores norm_topk_prob in this family and never divides weights by their sum.
    unread=(*deepseek_v3.FAMILY.unread, "norm_topk_prob"),
    parts=LATENT,
    experts=FieldRule(read=_read, write=_write),
    as_stored=None,
)
