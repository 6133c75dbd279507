"""Qwen3-MoE: Qwen3 with experts in some or all layers."""

from collections.abc import Iterable
from typing import Any

from mcore_ckpt.families.common.decoder import (
    ATTENTION_BIAS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    decoder_table,
    gated_rules,
    mlp_rules,
)
from mcore_ckpt.families.common.fields import (
    Fields,
    described_expert_size,
    expert_setting,
    require_experts,
    sparse_and_dense,
    write_layers,
)
from mcore_ckpt.families.common.layer_types import NO_WINDOW
from mcore_ckpt.mapping.rules import Rule, Table


def read_experts(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    """Return our fields for the experts and the layers that have them."""
    step, dense = fields.take("decoder_sparse_step", 1), fields.take("mlp_only_layers", [])
    layers = range(ours["num_layers"])
    # The field is num_experts in older folders, num_local_experts in newer ones.
    experts = fields.take("num_local_experts", fields.take("num_experts", 0) or 128)
    return {
        "num_experts": experts,
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": fields.take("moe_intermediate_size"),
        "moe_layer_freq": write_layers(i not in dense and (i + 1) % step == 0 for i in layers),
        "moe_router_pre_softmax": not fields.take("norm_topk_prob", False),
        "moe_aux_loss_coeff": fields.take("router_aux_loss_coef", 0.0),
    }


def _write(description: Description, theirs: Theirs) -> Theirs:
    require_experts(description)
    return write_experts(description, theirs)


def write_experts(description: Description, _: Theirs) -> Theirs:
    """Return their fields for the experts and the layers that have them."""
    if expert_setting(description, "moe_input_jitter_eps"):
        raise ValueError("it cannot express --moe-input-jitter-eps")
    experts = expert_setting(description, "num_experts")
    return {
        "moe_intermediate_size": described_expert_size(description),
        "num_experts": experts,
        "num_local_experts": experts,
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "norm_topk_prob": not expert_setting(description, "moe_router_pre_softmax"),
        "router_aux_loss_coef": expert_setting(description, "moe_aux_loss_coeff"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(sparse_and_dense(description)[1]),
    }


def table(description: Description, extra: Iterable[Rule] = ()) -> Table:
    """Return the rules of the weights, with ``extra`` rules appended."""
    sparse, dense = sparse_and_dense(description)
    rules = [
        *mlp_rules(description, dense),
        Rule("blocks.*.moe.router.weight", "model.layers.*.mlp.gate.weight", layers=sparse),
        *gated_rules("moe.experts.*.", "mlp.experts.*.", sparse),
    ]
    return decoder_table(description, rules, extra=extra)


FAMILY = Decoder(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fixed={"qk_layernorm": True},
    absent={"num_key_value_heads": 4, "router_aux_loss_coef": 0.001},
    parts=(NO_WINDOW, ATTENTION_BIAS),
    experts=FieldRule(read=read_experts, write=_write),
    weights=table,
)
