"""GLM-4.5: partly rotated heads, sigmoid routing with a bias, a shared expert."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import (
    around,
    attention_rules,
    read_rms_silu,
    tied_copies,
    write_rms_silu,
)
from mcore_ckpt.families.common.experts import (
    expert_layers,
    expert_rules,
    expert_setting,
    expert_size_of,
    require_routing,
)
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.moe.mtp_layers import (
    mtp_copies,
    mtp_rules,
    read_mtp,
    without_absent,
    write_mtp,
)
from mcore_ckpt.mapping.rules import Rule, Table

_NAMES = ("gate_proj", "up_proj", "down_proj")
_ABSENT = {
    "rms_norm_eps": 1e-5,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
}


as_stored = without_absent


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    rope = config.get("rope_parameters") or {}
    stated = dict(config)
    if "partial_rotary_factor" not in rope:
        stated["partial_rotary_factor"] = config.get("partial_rotary_factor") or 0.5
    fields = Fields(stated, absent=_ABSENT)
    fields.must_be("norm_topk_prob", True)
    ours = read_rms_silu(fields, partial=True) | read_mtp(fields)
    ours["qk_layernorm"] = fields.take("use_qk_norm", False)
    ours["add_qkv_bias"] = fields.take("attention_bias", False)
    count, dense = ours["num_layers"], fields.take("first_k_dense_replace")
    groups, kept = fields.take("n_group"), fields.take("topk_group")
    width = fields.take("moe_intermediate_size")
    moe = {
        "num_experts": fields.take("n_routed_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": f"[0]*{dense}+[1]*{count - dense}" if dense else "1",
        "moe_shared_expert_intermediate_size": width * fields.take("n_shared_experts"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": groups if groups > 1 else 0,
        "moe_router_group_topk": kept if groups > 1 else 0,
        "moe_router_topk_scaling_factor": float(fields.take("routed_scaling_factor", 1.0)),
    }
    return fields.described(ours, moe)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    require(description, add_bias_linear=False, window_size=(-1, 0))
    routing = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias": False,
        "moe_apply_probs_on_input": False,
        "moe_shared_expert_gate": False,
    }
    require_routing(description, routing)
    theirs = write_rms_silu(
        description, "Glm4MoeForCausalLM", partial=True, says=("mtp_num_layers",)
    )
    pattern = expert_layers(description)
    dense = pattern.count(0)
    if any(pattern[:dense]):
        raise ValueError("it cannot say --moe-layer-freq: dense layers come first")
    width = expert_size_of(description)
    rope = theirs["rope_parameters"]
    rope["partial_rotary_factor"] = setting(description, "rotary_percent")
    return theirs | {
        "model_type": "glm4_moe",
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "use_qk_norm": setting(description, "qk_layernorm"),
        "attention_bias": setting(description, "add_qkv_bias"),
        "first_k_dense_replace": dense,
        "moe_intermediate_size": width,
        "n_shared_experts": expert_setting(description, "moe_shared_expert_intermediate_size")
        // width,
        "n_routed_experts": expert_setting(description, "num_experts"),
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "n_group": expert_setting(description, "moe_router_num_groups") or 1,
        "topk_group": expert_setting(description, "moe_router_group_topk") or 1,
        "routed_scaling_factor": expert_setting(description, "moe_router_topk_scaling_factor")
        or 1.0,
        "norm_topk_prob": True,
        **write_mtp(description),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    pattern = expert_layers(description)
    sparse = tuple(layer for layer, has in enumerate(pattern) if has)
    dense = tuple(layer for layer, has in enumerate(pattern) if not has)
    mlp = "model.layers.*.mlp."
    rules = [
        *attention_rules(description),
        *_mlp("mlp.", mlp, dense),
        Rule("blocks.*.moe.router.weight", f"{mlp}gate.weight", layers=sparse),
        Rule(
            "blocks.*.moe.router.expert_bias",
            f"{mlp}gate.e_score_correction_bias",
            layers=sparse,
        ),
        *expert_rules(f"{mlp}experts.*.", _NAMES, sparse),
        *_mlp("moe.shared.", f"{mlp}shared_experts.", sparse),
    ]
    return Table(
        (*around(description, rules), *mtp_rules(description, rules)),
        setting(description, "num_layers"),
        expert_setting(description, "num_experts"),
        copies=tied_copies(description) | mtp_copies(description),
    )


def _mlp(ours: str, theirs: str, layers: tuple[int, ...]) -> list[Rule]:
    return [
        Rule(f"blocks.*.{ours}{mine}.weight", f"{theirs}{name}.weight", layers=layers)
        for mine, name in zip(("fc1.gate", "fc1.up", "fc2"), _NAMES, strict=True)
    ]
