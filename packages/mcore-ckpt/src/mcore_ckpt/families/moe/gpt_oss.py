"""gpt-oss: sinks, windows in every second layer, experts with biases and clamped gates."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import decoder_table, read_rms_silu, write_common
from mcore_ckpt.families.common.experts import expert_setting, expert_size_of
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.common.layer_types import read_windows, write_windows
from mcore_ckpt.mapping.rules import Rule, Table

_FIXED: dict[str, Any] = {
    "swiglu": False,
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "softmax_type": "learnable",
    "add_bias_linear": True,
}
_ABSENT = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "router_aux_loss_coef": 0.0,
    "max_position_embeddings": 131072,
    "swiglu_limit": 7.0,
    "attention_bias": True,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers takes where nothing is said of positions."""


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    stated = dict(config)
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        stated["rope_scaling"] = _ROPE
    fields = Fields(stated, keep=("layer_types",), absent=_ABSENT)
    fields.must_be("attention_bias", True)
    fields.must_be("swiglu_alpha", 1.702)
    for name in ("initial_context_length", "experts_per_token"):
        fields.maybe(name)  # copies of other fields, which nothing reads
    ours = read_rms_silu(fields, theta=150000.0) | _FIXED
    ours["activation_func_clamp_value"] = float(fields.take("swiglu_limit"))
    ours |= read_windows(fields, ours["num_layers"], 2)
    moe = {
        "num_experts": fields.take("num_local_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": ours["ffn_hidden_size"],
        "moe_router_bias": True,
        "moe_aux_loss_coeff": fields.take("router_aux_loss_coef"),
    }
    return fields.described(ours, moe)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    require(description, **_FIXED, normalization="RMSNorm", apply_layernorm_1p=False)
    require(description, qk_layernorm=False)
    if not expert_setting(description, "moe_router_bias"):
        raise ValueError("it cannot say a model without --moe-router-bias")
    says = (*_FIXED, "activation_func_clamp_value", "window_attn_skip_freq")
    theirs = write_common(description, "GptOssForCausalLM", says=says)
    return theirs | {
        "model_type": "gpt_oss",
        "intermediate_size": expert_size_of(description),
        "num_local_experts": expert_setting(description, "num_experts"),
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "router_aux_loss_coef": expert_setting(description, "moe_aux_loss_coeff"),
        "swiglu_limit": setting(description, "activation_func_clamp_value"),
        "swiglu_alpha": 1.702,
        "attention_bias": True,
        **write_windows(description),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights: experts lie stacked, a gate beside its up-projection, inputs first."""
    mlp, width = "model.layers.*.mlp.", expert_size_of(description)
    expert = "blocks.*.moe.experts.*."
    rules = [Rule("blocks.*.attention.sinks", "model.layers.*.self_attn.sinks")]
    for kind in ("weight", "bias"):
        is_matrix = kind == "weight"
        suffix = "" if is_matrix else "_bias"
        fc1 = tuple(f"{expert}fc1.{part}.{kind}" for part in ("gate", "up"))
        there = f"{mlp}experts.gate_up_proj{suffix}[*]"
        rules += [
            Rule(f"blocks.*.moe.router.{kind}", f"{mlp}router.{kind}"),
            Rule(fc1, there, transposed=is_matrix, groups=width),
            Rule(
                f"{expert}fc2.{kind}",
                f"{mlp}experts.down_proj{suffix}[*]",
                transposed=is_matrix,
            ),
        ]
    return decoder_table(
        description, rules, num_experts=expert_setting(description, "num_experts")
    )
