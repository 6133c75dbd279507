"""Qwen3-MoE: Qwen3 with experts in some or all layers."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import (
    decoder_table,
    mlp_rules,
    read_rms_silu,
    write_rms_silu,
)
from mcore_ckpt.families.common.experts import (
    expert_layers,
    expert_rules,
    expert_setting,
    require_experts,
)
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.dense.qwen2 import no_window
from mcore_ckpt.mapping.rules import Rule, Table

_ABSENT = {"num_key_value_heads": 4, "router_aux_loss_coef": 0.001}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, absent=_ABSENT)
    no_window(fields)
    biased = fields.take("attention_bias", False)
    ours = read_rms_silu(fields) | {"qk_layernorm": True}
    if biased:
        ours["add_attention_bias"] = True
    step, dense = fields.take("decoder_sparse_step", 1), fields.take("mlp_only_layers", [])
    pattern = [
        int(layer not in dense and (layer + 1) % step == 0)
        for layer in range(ours["num_layers"])
    ]
    # Older folders say num_experts, newer num_local_experts.
    experts = fields.take("num_local_experts", config.get("num_experts") or 128)
    fields.take("num_experts", 0)
    moe = {
        "num_experts": experts,
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": fields.take("moe_intermediate_size"),
        "moe_layer_freq": "1" if all(pattern) else str(pattern).replace(" ", ""),
        "moe_router_pre_softmax": not fields.take("norm_topk_prob", False),
        "moe_aux_loss_coeff": fields.take("router_aux_loss_coef", 0.0),
    }
    return fields.described(ours, moe)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    require_experts(description)
    require(description, qk_layernorm=True, add_bias_linear=False, add_qkv_bias=False)
    require(description, window_size=(-1, 0))
    if expert_setting(description, "moe_input_jitter_eps"):
        raise ValueError("it cannot say --moe-input-jitter-eps")
    says = ("add_attention_bias",)
    theirs = write_rms_silu(description, "Qwen3MoeForCausalLM", says=says)
    experts = expert_setting(description, "num_experts")
    width = expert_setting(description, "moe_ffn_hidden_size") or theirs["intermediate_size"]
    pattern = expert_layers(description)
    return theirs | {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": width,
        "num_experts": experts,
        "num_local_experts": experts,
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "norm_topk_prob": not expert_setting(description, "moe_router_pre_softmax"),
        "router_aux_loss_coef": expert_setting(description, "moe_aux_loss_coeff"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, sparse in enumerate(pattern) if not sparse],
        "use_sliding_window": False,
        "attention_bias": setting(description, "add_attention_bias"),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    mlp = "model.layers.*.mlp."
    pattern = expert_layers(description)
    sparse = tuple(layer for layer, has in enumerate(pattern) if has)
    dense = tuple(layer for layer, has in enumerate(pattern) if not has)
    rules = [
        *mlp_rules(description, dense),
        Rule("blocks.*.moe.router.weight", f"{mlp}gate.weight", layers=sparse),
        *expert_rules(f"{mlp}experts.*.", ("gate_proj", "up_proj", "down_proj"), sparse),
    ]
    num_experts = expert_setting(description, "num_experts")
    return decoder_table(description, rules, num_experts=num_experts)
