"""Qwen3.5, dense and with experts: Qwen3-Next with a matrix for each input of delta nets.

Text models only; the three-dimensional positions of images reduce to one dimension for text.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mcore_ckpt.families.common.decoder import ATTENTION_BIAS, Decoder, Description, FieldRule
from mcore_ckpt.families.common.fields import settings
from mcore_ckpt.families.recurrent.qwen3_next import (
    delta_table,
    kernel_rules,
    mixers,
    read_experts,
    write_experts,
)
from mcore_ckpt.mapping.rules import Rule
from mcore_models.logical_tensors import delta_sizes


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config.get("rope_parameters") or {})
    without_mrope = {
        name: value for name, value in rope.items() if not name.startswith("mrope")
    }
    return {**config, "rope_parameters": without_mrope}


def _delta_rules(description: Description, layers: tuple[int, ...]) -> list[Rule]:
    sizes = delta_sizes(settings(description))
    ours, there = "blocks.*.delta_net.in_proj.", "model.layers.*.linear_attn.in_proj_"
    qkv = tuple(f"{ours}{part}.weight" for part in "qkv")
    rows = (sizes.keys, sizes.keys, sizes.values)
    return [
        Rule(qkv, f"{there}qkv.weight", sizes=rows, layers=layers),
        *(Rule(f"{ours}{x}.weight", f"{there}{x}.weight", layers=layers) for x in "zba"),
        *kernel_rules(description, layers),
    ]


_DENSE = Decoder(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    fixed={"qk_layernorm": True, "attention_output_gate": True, "apply_layernorm_1p": True},
    absent={
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
    },
    refused={"attn_output_gate": True},
    # Layers of multi-token prediction are not converted, as in transformers.
    dropped=("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    unread=("mamba_ssm_dtype",),
    parts=(ATTENTION_BIAS, mixers("-")),
    layers=("G-", "*-"),
    partial=0.25,
    normalize=_normalize,
    weights=partial(delta_table, delta_rules=_delta_rules),
)

FAMILIES = {
    "qwen3_5_text": _DENSE,
    "qwen3_5_moe_text": replace(
        _DENSE,
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        absent={
            **_DENSE.absent,
            "num_key_value_heads": 2,
            "intermediate_size": 512,  # used by no layer
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        only={"norm_topk_prob": True},
        parts=(ATTENTION_BIAS, mixers("E")),
        experts=FieldRule(read=read_experts, write=write_experts),
        layers=("GE", "*E"),
    ),
}
"""Families by ``model_type``."""
