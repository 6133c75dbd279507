"""LFM2, dense and with experts: gated short convolutions, and attention in some layers."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mcore_ckpt.families.common.decoder import (
    OWN_HEADS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    around,
    attention_rules,
    gated_rules,
    pair,
    tied_copies,
)
from mcore_ckpt.families.common.fields import (
    Fields,
    described_expert_size,
    expert_setting,
    require_routing,
    setting,
    settings,
)
from mcore_ckpt.families.recurrent.mamba_parts import HYBRID, renamed_norm
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.layer_patterns import join_layers, pattern_layers

_WORDS = {"conv": "C", "full_attention": "*"}
_NAMES = {
    "o_proj": "out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
}
"""LFM2's names of attention tensors that differ from Llama's."""
_MLP = ("w1", "w3", "w2")
_ROUTING = {
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 0,
    "moe_router_bias": False,
    "moe_apply_probs_on_input": False,
    "moe_shared_expert_intermediate_size": 0,
    "moe_input_jitter_eps": 0.0,
    "moe_aux_loss_coeff": 0.0,
}


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    usual = dict(config)
    for old, new in (("block_ff_dim", "intermediate_size"), ("block_norm_eps", "norm_eps")):
        if (value := usual.pop(old, None)) is not None:
            usual[new] = value
    if (tied := usual.pop("tie_embedding", None)) is not None:
        usual["tie_word_embeddings"] = tied
    return usual


def _adjusted_width(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    """Return the width of feed-forward layers: 2/3 of the field, scaled and rounded up."""
    width, multiple = ours["ffn_hidden_size"], fields.take("block_multiple_of", 256)
    factor = fields.maybe("block_ffn_dim_multiplier", 1.0)
    if fields.take("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        width = int(factor * width) if factor is not None else width
        width = -(-width // multiple) * multiple
    return {"ffn_hidden_size": width}


def _own_width(_: Description, _theirs: Theirs) -> Theirs:
    return {"block_auto_adjust_ff_dim": False}


def _read_layers(fields: Fields, ours: dict[str, Any], has_experts: bool) -> dict[str, Any]:
    count = ours["num_layers"]
    attending = fields.take("full_attn_idxs", list(range(count)))
    default = ["full_attention" if layer in attending else "conv" for layer in range(count)]
    kinds = fields.take("layer_types", default)
    if len(kinds) != count or not set(kinds) <= _WORDS.keys():
        raise ValueError(
            f"config.json has layer_types={kinds!r}: it must name conv or full_attention for "
            f"each of num_hidden_layers, {count}."
        )
    dense = fields.take("num_dense_layers") if has_experts else count
    letters = [
        _WORDS[kind] + ("-" if layer < dense else "E") for layer, kind in enumerate(kinds)
    ]
    return {"hybrid_override_pattern": join_layers(letters)}


def _write_layers(description: Description, _: Theirs, has_experts: bool) -> Theirs:
    layers = pattern_layers(setting(description, "hybrid_override_pattern"))
    words = {letter: word for word, letter in _WORDS.items()}
    halves = [layer[1] for layer in layers]
    dense = halves.index("E") if "E" in halves else len(halves)
    if "-" in halves[dense:]:
        raise ValueError("it cannot express dense layers after layers with experts")
    theirs = {"layer_types": [words[layer[0]] for layer in layers]}
    return theirs | ({"num_dense_layers": dense} if has_experts else {})


def _layers(has_experts: bool) -> FieldRule:
    return FieldRule(
        covers=HYBRID,
        read=partial(_read_layers, has_experts=has_experts),
        write=partial(_write_layers, has_experts=has_experts),
        keep=("layer_types",),
    )


def _read_experts(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": fields.take("num_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": fields.take("moe_intermediate_size"),
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": float(fields.take("routed_scaling_factor", 1.0)),
        "moe_router_enable_expert_bias": fields.take("use_expert_bias", True),
        "moe_router_dtype": "fp32",
    }


def _write_experts(description: Description, _: Theirs) -> Theirs:
    require_routing(description, _ROUTING)
    return {
        "num_experts": expert_setting(description, "num_experts"),
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "moe_intermediate_size": described_expert_size(description),
        "routed_scaling_factor": expert_setting(description, "moe_router_topk_scaling_factor")
        or 1.0,
        "use_expert_bias": expert_setting(description, "moe_router_enable_expert_bias"),
    }


def _conv_rules(description: Description, layers: Collection[int]) -> list[Rule]:
    """Return the rules of gated short convolutions."""
    ours, there, layer_ids = "blocks.*.short_conv.", "model.layers.*.conv.", tuple(layers)
    rules = []
    kinds = ("weight", "bias") if setting(description, "short_conv_bias") else ("weight",)
    for kind in kinds:
        parts = tuple(f"{ours}in_proj.{part}.{kind}" for part in ("B", "C", "x"))
        rules += [
            Rule(parts, f"{there}in_proj.{kind}", layers=layer_ids),
            Rule(f"{ours}conv1d.x.{kind}", f"{there}conv.{kind}", layers=layer_ids),
            Rule(f"{ours}out_proj.{kind}", f"{there}out_proj.{kind}", layers=layer_ids),
        ]
    return rules


def _table(description: Description) -> Table:
    layers = pattern_layers(setting(description, "hybrid_override_pattern"))
    layers_of = {
        letter: tuple(i for i, layer in enumerate(layers) if letter in layer)
        for letter in "C*-E"
    }
    there, router = "model.layers.*.", "blocks.*.moe.router."
    rules = [
        Rule(
            f"blocks.*.{norm}_norm.weight",
            f"{there}operator_norm.weight",
            layers=layers_of[one],
        )
        for norm, one in (("short_conv", "C"), ("attention", "*"))
    ]
    rules += _conv_rules(description, layers_of["C"])
    for rule in attention_rules(description, {}):
        stem = rule.theirs.split(".")[-2]
        theirs = rule.theirs.replace(stem, _NAMES.get(stem, stem))
        rules.append(replace(rule, theirs=theirs, layers=layers_of["*"]))
    rules += [
        Rule("blocks.*.mlp_norm.weight", f"{there}ffn_norm.weight"),
        *gated_rules("mlp.", "feed_forward.", layers_of["-"], _MLP),
        Rule(f"{router}weight", f"{there}feed_forward.gate.weight", layers=layers_of["E"]),
    ]
    if expert_setting(description, "moe_router_enable_expert_bias"):
        bias = f"{there}feed_forward.expert_bias"
        rules.append(Rule(f"{router}expert_bias", bias, layers=layers_of["E"]))
    rules += gated_rules("moe.experts.*.", "feed_forward.experts.*.", layers_of["E"], _MLP)
    return Table(
        renamed_norm(around(description, rules), "embedding_norm"),
        settings(description).num_layers,
        expert_setting(description, "num_experts"),
        copies=tied_copies(description),
    )


_PAIRS = (
    pair("short_conv_kernel_dim", "conv_L_cache", 3),
    pair("short_conv_bias", "conv_bias", False),
)

_DENSE = Decoder(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    fixed={"qk_layernorm": True},
    absent={
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
        "norm_eps": 1e-5,
    },
    # Fields of the first releases, which transformers does not read.
    unread=(
        *("block_dim", "block_mlp_init_scale", "block_out_init_scale", "block_use_swiglu"),
        *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init"),
    ),
    parts=(
        *_PAIRS,
        OWN_HEADS,
        FieldRule(read=_adjusted_width, write=_own_width),
        _layers(has_experts=False),
    ),
    layers=("C-", "*-"),
    activation=("", ""),
    epsilon="norm_eps",
    theta=1e6,
    normalize=_normalize,
    weights=_table,
)

FAMILIES = {
    "lfm2": _DENSE,
    "lfm2_moe": replace(
        _DENSE,
        model_type="lfm2_moe",
        architecture="Lfm2MoeForCausalLM",
        absent={**_DENSE.absent, "num_dense_layers": 2},
        only={"norm_topk_prob": True},
        parts=(*_PAIRS, OWN_HEADS, _layers(has_experts=True)),
        experts=FieldRule(read=_read_experts, write=_write_experts),
        layers=("C-", "*-", "CE", "*E"),
    ),
}
"""Families by ``model_type``."""
