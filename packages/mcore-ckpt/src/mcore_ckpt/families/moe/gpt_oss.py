"""gpt-oss: sinks, windows in every second layer, experts with biases and clamped gates."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import (
    Decoder,
    Description,
    FieldRule,
    Theirs,
    decoder_table,
    pair,
)
from mcore_ckpt.families.common.fields import Fields, described_expert_size, expert_setting
from mcore_ckpt.families.common.layer_types import windows
from mcore_ckpt.mapping.rules import Rule, Table

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary parameters that transformers assumes if config.json has none."""


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, "rope_parameters": config.get("rope_parameters") or _ROPE}


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": fields.take("num_local_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": ours["ffn_hidden_size"],
        "moe_router_bias": True,
        "moe_aux_loss_coeff": fields.take("router_aux_loss_coef"),
    }


def _write(description: Description, _: Theirs) -> Theirs:
    if not expert_setting(description, "moe_router_bias"):
        raise ValueError("it cannot express a model without --moe-router-bias")
    return {
        "intermediate_size": described_expert_size(description),
        "num_local_experts": expert_setting(description, "num_experts"),
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "router_aux_loss_coef": expert_setting(description, "moe_aux_loss_coeff"),
    }


def _table(description: Description) -> Table:
    """Return the rules of stacked experts, gate and up interleaved, stored [in, out]."""
    mlp, width = "model.layers.*.mlp.", described_expert_size(description)
    expert = "blocks.*.moe.experts.*."
    rules = [Rule("blocks.*.attention.sinks", "model.layers.*.self_attn.sinks")]
    for kind in ("weight", "bias"):
        is_matrix = kind == "weight"
        suffix = "" if is_matrix else "_bias"
        fc1 = tuple(f"{expert}fc1.{part}.{kind}" for part in ("gate", "up"))
        there = f"{mlp}experts.gate_up_proj{suffix}[*]"
        down = f"{mlp}experts.down_proj{suffix}[*]"
        rules += [
            Rule(f"blocks.*.moe.router.{kind}", f"{mlp}router.{kind}"),
            Rule(fc1, there, transposed=is_matrix, groups=width),
            Rule(f"{expert}fc2.{kind}", down, transposed=is_matrix),
        ]
    return decoder_table(description, rules)


FAMILY = Decoder(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fixed={
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "add_bias_linear": True,
    },
    absent={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "router_aux_loss_coef": 0.0,
        "max_position_embeddings": 131072,
        "swiglu_limit": 7.0,
    },
    only={"attention_bias": True, "swiglu_alpha": 1.702},
    # Duplicates of other fields.
    unread=("initial_context_length", "experts_per_token"),
    parts=(pair("activation_func_clamp_value", "swiglu_limit", kind=float), windows(2)),
    experts=FieldRule(covers=("add_qkv_bias",), read=_read, write=_write),
    theta=150000.0,
    normalize=_normalize,
    weights=_table,
)
