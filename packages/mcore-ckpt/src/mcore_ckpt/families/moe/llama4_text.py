"""Llama 4, its text model: chunks with rotation, every fourth layer whole and without it."""

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
    expert_setting,
    expert_size_of,
    require_routing,
)
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.common.layer_types import FULL, read_skipped, write_pattern
from mcore_ckpt.mapping.rules import Rule, Table

CHUNKED = "chunked_attention"
_NAMES = ("gate_proj", "up_proj", "down_proj")
_ABSENT = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "no_rope_layer_interval": 4,
    "interleave_moe_layer_step": 1,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 131072,
    "router_aux_loss_coef": 0.001,
}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, keep=("layer_types",), absent=_ABSENT)
    ours = read_rms_silu(fields, theta=5e5)
    count, width = ours["num_layers"], ours["ffn_hidden_size"]
    interval = fields.take("no_rope_layer_interval")
    rotated = fields.maybe("no_rope_layers")  # 1 stands for rotation
    if not rotated:
        rotated = [(layer + 1) % interval != 0 for layer in range(count)]
    types = fields.maybe("layer_types") or [CHUNKED if has else FULL for has in rotated]
    whole = [kind == FULL for kind in types]
    chunk = fields.maybe("attention_chunk_size") or 0
    ours |= {
        "ffn_hidden_size": fields.take("intermediate_size_mlp", 16384),
        "rotary_interleaved": True,
        "rope_skip_freq": write_pattern([not has for has in rotated]),
        "qk_l2_norm": fields.take("use_qk_norm", True),
        "add_attention_bias": fields.take("attention_bias", False),
    }
    if chunk and not all(whole):
        ours["attention_chunk_size"] = chunk
        ours["window_attn_skip_freq"] = write_pattern(whole, ones=False)
    span, scale = fields.take("floor_scale"), float(fields.take("attn_scale"))
    if fields.take("attn_temperature_tuning", True):
        ours |= {"attention_temperature_span": int(span), "attention_temperature_scale": scale}
    moe = _read_experts(fields, count, width)
    return fields.described(ours, moe)


def _read_experts(fields: Fields, count: int, width: int) -> dict[str, Any]:
    step, sparse = fields.take("interleave_moe_layer_step"), fields.maybe("moe_layers")
    sparse = set(range(step - 1, count, step) if sparse is None else sparse)
    pattern = [int(layer in sparse) for layer in range(count)]
    topk = fields.take("num_experts_per_tok")
    if topk != 1:
        raise ValueError(
            f"config.json has num_experts_per_tok={topk}, which mcore cannot represent here: "
            "only 1, whose score is not made to sum to 1 with others."
        )
    return {
        "num_experts": fields.take("num_local_experts"),
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": "1" if all(pattern) else str(pattern).replace(" ", ""),
        "moe_shared_expert_intermediate_size": width,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_aux_loss_coeff": fields.take("router_aux_loss_coef"),
        "moe_input_jitter_eps": fields.take("router_jitter_noise", 0.0),
    }


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    require(description, rotary_interleaved=True, window_size=(-1, 0), qk_layernorm=False)
    require(description, add_bias_linear=False, add_qkv_bias=False)
    width = expert_size_of(description)
    routing = {
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_router_enable_expert_bias": False,
        "moe_router_bias": False,
        "moe_router_topk": 1,
        "moe_shared_expert_intermediate_size": width,
    }
    require_routing(description, routing)
    says = (
        *("rotary_interleaved", "rope_skip_freq", "qk_l2_norm", "add_attention_bias"),
        *("attention_chunk_size", "window_attn_skip_freq"),
        *("attention_temperature_span", "attention_temperature_scale"),
    )
    theirs = write_rms_silu(description, "Llama4ForCausalLM", says=says)
    rotated = [not skip for skip in read_skipped(description, "rope_skip_freq")]
    whole = read_skipped(description, "window_attn_skip_freq", ones=False)
    chunk = setting(description, "attention_chunk_size")
    span = setting(description, "attention_temperature_span")
    return theirs | {
        "model_type": "llama4_text",
        "intermediate_size_mlp": theirs["intermediate_size"],
        "intermediate_size": width,
        "no_rope_layers": [int(has) for has in rotated],
        "layer_types": [FULL if full or not chunk else CHUNKED for full in whole],
        "attention_chunk_size": chunk or None,
        "use_qk_norm": setting(description, "qk_l2_norm"),
        "attention_bias": setting(description, "add_attention_bias"),
        "attn_temperature_tuning": bool(span),
        "floor_scale": span or 8192,
        "attn_scale": setting(description, "attention_temperature_scale"),
        "num_local_experts": expert_setting(description, "num_experts"),
        "num_experts_per_tok": 1,
        "moe_layers": [i for i, has in enumerate(expert_layers(description)) if has],
        "router_aux_loss_coef": expert_setting(description, "moe_aux_loss_coeff"),
        "router_jitter_noise": expert_setting(description, "moe_input_jitter_eps"),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights: experts lie stacked, inputs first, gates before up-projections."""
    pattern = expert_layers(description)
    sparse = tuple(layer for layer, has in enumerate(pattern) if has)
    dense = tuple(layer for layer, has in enumerate(pattern) if not has)
    at, expert = "model.layers.*.feed_forward.", "blocks.*.moe.experts.*."
    fc1 = (f"{expert}fc1.gate.weight", f"{expert}fc1.up.weight")
    down = f"{at}experts.down_proj[*]"
    rules = [
        *attention_rules(description),
        *_mlp("mlp.", at, dense),
        Rule("blocks.*.moe.router.weight", f"{at}router.weight", layers=sparse),
        Rule(fc1, f"{at}experts.gate_up_proj[*]", transposed=True, layers=sparse),
        Rule(f"{expert}fc2.weight", down, transposed=True, layers=sparse),
        *_mlp("moe.shared.", f"{at}shared_expert.", sparse),
    ]
    return Table(
        around(description, rules),
        setting(description, "num_layers"),
        expert_setting(description, "num_experts"),
        copies=tied_copies(description),
    )


def _mlp(ours: str, theirs: str, layers: tuple[int, ...]) -> list[Rule]:
    return [
        Rule(f"blocks.*.{ours}{mine}.weight", f"{theirs}{name}.weight", layers=layers)
        for mine, name in zip(("fc1.gate", "fc1.up", "fc2"), _NAMES, strict=True)
    ]
