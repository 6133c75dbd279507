"""Llama 4, text model: chunked attention with rotation, or full attention without rotation."""

from typing import Any

from mcore_ckpt.families.common.decoder import (
    ATTENTION_BIAS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    decoder_table,
    gated_rules,
    pair,
)
from mcore_ckpt.families.common.fields import (
    Fields,
    described_expert_size,
    expert_setting,
    require_routing,
    setting,
    sparse_and_dense,
    write_layers,
)
from mcore_ckpt.families.common.layer_types import (
    FULL,
    read_rotated,
    read_skipped,
    write_pattern,
)
from mcore_ckpt.mapping.rules import Rule, Table

_CHUNKED = "chunked_attention"


def _read_layers(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    rotated = read_rotated(fields, ours["num_layers"])
    types = fields.maybe("layer_types") or [_CHUNKED if has else FULL for has in rotated]
    whole = [kind == FULL for kind in types]
    chunk = fields.maybe("attention_chunk_size") or 0
    layer_fields: dict[str, Any] = {
        "rope_skip_freq": write_pattern([not has for has in rotated])
    }
    if chunk and not all(whole):
        layer_fields["attention_chunk_size"] = chunk
        layer_fields["window_attn_skip_freq"] = write_pattern(whole, ones=False)
    return layer_fields


def _write_layers(description: Description, _: Theirs) -> Theirs:
    rotated = [not skip for skip in read_skipped(description, "rope_skip_freq")]
    whole = read_skipped(description, "window_attn_skip_freq", ones=False)
    chunk = setting(description, "attention_chunk_size")
    return {
        "no_rope_layers": [int(has) for has in rotated],
        "layer_types": [FULL if full or not chunk else _CHUNKED for full in whole],
        "attention_chunk_size": chunk or None,
    }


def _read_temperature(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    span, scale = fields.take("floor_scale"), float(fields.take("attn_scale"))
    if not fields.take("attn_temperature_tuning", True):
        return {}
    return {"attention_temperature_span": int(span), "attention_temperature_scale": scale}


def _write_temperature(description: Description, _: Theirs) -> Theirs:
    span = setting(description, "attention_temperature_span")
    return {
        "attn_temperature_tuning": bool(span),
        "floor_scale": span or 8192,
        "attn_scale": setting(description, "attention_temperature_scale"),
    }


def _read_experts(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    count, width = ours["num_layers"], ours["ffn_hidden_size"]
    ours["ffn_hidden_size"] = fields.take("intermediate_size_mlp", 16384)
    step, sparse = fields.take("interleave_moe_layer_step"), fields.maybe("moe_layers")
    sparse = set(range(step - 1, count, step) if sparse is None else sparse)
    topk = fields.take("num_experts_per_tok")
    if topk != 1:
        raise ValueError(
            f"config.json has num_experts_per_tok={topk}, which mcore cannot represent here: "
            "only 1, whose score is used without normalization over the chosen experts."
        )
    return {
        "num_experts": fields.take("num_local_experts"),
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": write_layers(layer in sparse for layer in range(count)),
        "moe_shared_expert_intermediate_size": width,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_aux_loss_coeff": fields.take("router_aux_loss_coef"),
        "moe_input_jitter_eps": fields.take("router_jitter_noise", 0.0),
    }


def _write_experts(description: Description, theirs: Theirs) -> Theirs:
    width = described_expert_size(description)
    routing = {
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_router_enable_expert_bias": False,
        "moe_router_bias": False,
        "moe_router_topk": 1,
        "moe_shared_expert_intermediate_size": width,
    }
    require_routing(description, routing)
    return {
        "intermediate_size_mlp": theirs["intermediate_size"],
        "intermediate_size": width,
        "num_local_experts": expert_setting(description, "num_experts"),
        "num_experts_per_tok": 1,
        "moe_layers": list(sparse_and_dense(description)[0]),
        "router_aux_loss_coef": expert_setting(description, "moe_aux_loss_coeff"),
        "router_jitter_noise": expert_setting(description, "moe_input_jitter_eps"),
    }


def _table(description: Description) -> Table:
    """Return the rules of stacked experts, stored [in, out], gates before up-projections."""
    sparse, dense = sparse_and_dense(description)
    at, expert = "model.layers.*.feed_forward.", "blocks.*.moe.experts.*."
    fc1 = (f"{expert}fc1.gate.weight", f"{expert}fc1.up.weight")
    down = f"{at}experts.down_proj[*]"
    rules = [
        *gated_rules("mlp.", "feed_forward.", dense),
        Rule("blocks.*.moe.router.weight", f"{at}router.weight", layers=sparse),
        Rule(fc1, f"{at}experts.gate_up_proj[*]", transposed=True, layers=sparse),
        Rule(f"{expert}fc2.weight", down, transposed=True, layers=sparse),
        *gated_rules("moe.shared.", "feed_forward.shared_expert.", sparse),
    ]
    return decoder_table(description, rules)


_LAYERS = FieldRule(
    covers=("rope_skip_freq", "attention_chunk_size", "window_attn_skip_freq"),
    read=_read_layers,
    write=_write_layers,
    keep=("layer_types",),
)
_TEMPERATURE = FieldRule(
    covers=("attention_temperature_span", "attention_temperature_scale"),
    read=_read_temperature,
    write=_write_temperature,
)

FAMILY = Decoder(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    fixed={"rotary_interleaved": True},
    absent={
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
    },
    parts=(_LAYERS, pair("qk_l2_norm", "use_qk_norm", True), ATTENTION_BIAS, _TEMPERATURE),
    experts=FieldRule(read=_read_experts, write=_write_experts),
    theta=5e5,
    weights=_table,
)
