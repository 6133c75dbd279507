"""ERNIE 4.5 with experts: softmax scores, chosen with a bias; shared experts are one MLP."""

from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import (
    Description,
    FieldRule,
    Theirs,
    decoder_table,
    gated_rules,
)
from mcore_ckpt.families.common.fields import (
    PLAIN_ROUTING,
    Fields,
    described_expert_size,
    expert_layers,
    expert_setting,
    require_routing,
    require_value,
    sparse_and_dense,
    write_layers,
)
from mcore_ckpt.families.dense import variants as dense_ernie
from mcore_ckpt.mapping.rules import Rule, Table

_ROUTING = PLAIN_ROUTING | {
    "moe_router_pre_softmax": False,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_gate": False,
    "moe_input_jitter_eps": 0.0,
}


def _layers(count: int, first: int, last: int, step: int) -> list[int]:
    return [int(first <= i <= last and (i + 1) % step == 0) for i in range(count)]


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    count, width = ours["num_layers"], fields.take("moe_intermediate_size")
    first, last = (fields.take(f"moe_layer_{end}_index") for end in ("start", "end"))
    last = count - 1 if last == -1 else last  # the only negative number allowed
    step = fields.take("moe_layer_interval")
    if step < 1:
        raise ValueError(f"config.json has moe_layer_interval={step}: it must be 1 or more.")
    return {
        "num_experts": fields.take("moe_num_experts"),
        "moe_router_topk": fields.take("moe_k"),
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": write_layers(_layers(count, first, last, step)),
        "moe_shared_expert_intermediate_size": width * fields.take("moe_num_shared_experts"),
        "moe_aux_loss_coeff": fields.take("router_aux_loss_coef"),
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    }


def _write(description: Description, _: Theirs) -> Theirs:
    require_routing(description, _ROUTING)
    pattern, width = expert_layers(description), described_expert_size(description)
    sparse, _dense = sparse_and_dense(description)
    ends = (sparse[0], sparse[-1]) if sparse else (1, 0)
    steps = range(1, len(pattern) + 1)
    matching_steps = [step for step in steps if _layers(len(pattern), *ends, step) == pattern]
    if not matching_steps:
        raise ValueError("it cannot express --moe-layer-freq: only each N-th layer of a range")
    shared = expert_setting(description, "moe_shared_expert_intermediate_size")
    require_value("moe_shared_expert_intermediate_size", shared, shared // width * width)
    return {
        "moe_layer_start_index": ends[0],
        "moe_layer_end_index": ends[1],
        "moe_layer_interval": matching_steps[0],
        "moe_intermediate_size": width,
        "moe_num_shared_experts": shared // width,
        "moe_num_experts": expert_setting(description, "num_experts"),
        "moe_k": expert_setting(description, "moe_router_topk"),
        "router_aux_loss_coef": expert_setting(description, "moe_aux_loss_coeff"),
    }


def _table(description: Description) -> Table:
    sparse, dense = sparse_and_dense(description)
    router, there = "blocks.*.moe.router.", "model.layers.*.mlp."
    bias = f"{there}moe_statics.e_score_correction_bias[0]"
    halves = [
        *gated_rules("mlp.", "mlp.", dense),
        Rule(f"{router}weight", f"{there}gate.weight", layers=sparse),
        Rule(f"{router}expert_bias", bias, layers=sparse),
        *gated_rules("moe.experts.*.", "mlp.experts.*.", sparse),
    ]
    if expert_setting(description, "moe_shared_expert_intermediate_size"):
        halves += gated_rules("moe.shared.", "mlp.shared_experts.", sparse)
    table = decoder_table(description, halves)
    return replace(table, droppable=(*table.droppable, "model.mtp_*"))


FAMILY = replace(
    dense_ernie.FAMILIES["ernie4_5"],
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    absent={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "router_aux_loss_coef": 0.001,
    },
    only={"use_bias": False, "moe_norm_min": 1e-12},
    # transformers ignores both fields, and omits the predictors' weights as this table does.
    unread=("moe_capacity", "moe_use_aux_free"),
    dropped=("num_nextn_predict_layers",),
    parts=(),
    experts=FieldRule(read=_read, write=_write),
    weights=_table,
)
