"""Phi-3.5-MoE: Mixtral with LayerNorm, biases, LongRoPE, and experts chosen by SparseMixer.

Beyond the original context the released code and mcore rotate by the long factors. The class of
transformers (5.23) rotates by the short factors at every length.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import (
    ATTENTION_BIAS,
    Description,
    FieldRule,
    Theirs,
    pair,
)
from mcore_ckpt.families.common.fields import (
    PLAIN_ROUTING,
    Fields,
    expert_setting,
    require,
    require_routing,
    setting,
)
from mcore_ckpt.families.common.layer_types import WINDOW
from mcore_ckpt.families.moe import mixtral
from mcore_ckpt.mapping.rules import Rule, Table

_ROUTING = {"moe_router_score_function": "sparsemixer", "moe_router_topk": 2}
_EPSILON = "moe_router_sparsemixer_eps"
_MAGNITUDES = ("short_mscale", "long_mscale")


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "longrope", "su"):
        raise ValueError(f"config.json has rope_type={kind!r}: only default and longrope.")
    short, long = (rope.pop(name, None) for name in _MAGNITUDES)
    if kind != "default":
        if not short or short != long:
            raise ValueError(
                f"config.json has short_mscale={short!r} and long_mscale={long!r} in "
                "rope_parameters, which mcore represents as one --rope-attention-factor: they "
                "must be equal."
            )
        rope["attention_factor"] = short
    return {**config, "rope_parameters": rope}


def _write_magnitudes(description: Description, theirs: Theirs) -> Theirs:
    if setting(description, "rope_type") == "rope":
        require(description, use_rope_scaling=False, rotary_seq_len_interpolation_factor=1.0)
        return {}
    require(description, rope_type="longrope")
    magnitude = setting(description, "rope_attention_factor")
    if not magnitude:
        raise ValueError("it cannot express --rope-attention-factor 0: only a number above 0")
    for table in (theirs["rope_parameters"], theirs["rope_scaling"]):
        table.pop("attention_factor", None)
        table.update(dict.fromkeys(_MAGNITUDES, magnitude))
    context = "original_max_position_embeddings"
    return {context: setting(description, context)}


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    epsilon = fields.take("router_jitter_noise", 0.01)
    noise = fields.take("input_jitter_noise", 0.0)
    experts = mixtral.read_experts(fields, ours) | {"moe_input_jitter_eps": noise}
    if experts["moe_router_topk"] != 2:
        raise ValueError(
            f"config.json has num_experts_per_tok={experts['moe_router_topk']}: SparseMixer "
            "chooses 2 experts."
        )
    return experts | _ROUTING | {_EPSILON: epsilon}


def _write(description: Description, theirs: Theirs) -> Theirs:
    require_routing(description, _ROUTING)
    kind = "moe_router_score_function"
    plain = description["moe"] | {kind: PLAIN_ROUTING[kind]}
    written = mixtral.write_experts({**description, "moe": plain}, theirs)
    written["input_jitter_noise"] = written["router_jitter_noise"]
    return written | {"router_jitter_noise": expert_setting(description, _EPSILON)}


def _table(description: Description) -> Table:
    table = mixtral.FAMILY.table(description)
    if not setting(description, "add_output_bias"):
        return table
    return replace(table, rules=(*table.rules, Rule("lm_head.bias", "lm_head.bias")))


def _renames(names: Collection[str]) -> dict[str, str]:
    """Return the table's names for a state dict of transformers 5, which has ``mlp.router``."""
    new_names = {
        name: name.replace(".mlp.router.", ".block_sparse_moe.gate.").replace(
            ".mlp.", ".block_sparse_moe."
        )
        for name in names
    }
    return {name: new for name, new in new_names.items() if name != new}


FAMILY = replace(
    mixtral.FAMILY,
    model_type="phimoe",
    architecture="PhiMoEForCausalLM",
    fixed={"normalization": "LayerNorm"},
    absent={
        **mixtral.FAMILY.absent,
        "max_position_embeddings": 131072,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    },
    unread=("original_max_position_embeddings",),
    parts=(
        ATTENTION_BIAS,
        WINDOW,
        pair("add_output_bias", "lm_head_bias", False),
        FieldRule(write=_write_magnitudes),
    ),
    experts=FieldRule(read=_read, write=_write),
    weights=_table,
    normalize=_normalize,
    renames=_renames,
)
