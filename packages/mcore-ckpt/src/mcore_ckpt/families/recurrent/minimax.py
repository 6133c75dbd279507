"""MiniMax-Text-01 and M1: lightning attention, attention in every eighth layer, experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import (
    NORMS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    around,
    attention_rules,
    gated_rules,
    tied_copies,
)
from mcore_ckpt.families.common.fields import (
    Fields,
    expert_setting,
    setting,
    settings,
)
from mcore_ckpt.families.common.layer_types import WINDOW
from mcore_ckpt.families.moe import mixtral
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.layer_patterns import join_layers, pattern_layers

_WORDS = {"linear_attention": "L", "full_attention": "*"}
_FACTORS = {"residual_stream_factors": "alpha", "residual_output_factors": "beta"}
_KINDS = ("full_attn", "linear_attn", "mlp")
"""Layers with factors, in the order of ``--residual-stream-factors``."""
_COMPUTED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Tensors of lightning attention that transformers stores and the config determines."""


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    # The releases have rotary_dim, a number of channels, where transformers has their share.
    usual = dict(config)
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated, rope = usual.pop("rotary_dim", None), config.get("rope_parameters") or {}
    if rotated and "partial_rotary_factor" not in rope:
        usual["partial_rotary_factor"] = rotated / width
    return usual


def _read_layers(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    kinds = fields.take("layer_types", []) or [
        "linear_attention" if layer % 2 else "full_attention"
        for layer in range(ours["num_layers"])
    ]
    if unknown := sorted(set(kinds) - _WORDS.keys()):
        raise ValueError(
            f"config.json has layer_types {', '.join(map(repr, unknown))}: only "
            f"{' and '.join(_WORDS)}."
        )
    factors = {
        name: [float(fields.take(f"{kind}_{letter}_factor", 1)) for kind in _KINDS]
        for name, letter in _FACTORS.items()
    }
    pattern = join_layers(f"{_WORDS[kind]}E" for kind in kinds)
    return {"hybrid_override_pattern": pattern, **factors}


def _write_layers(description: Description, theirs: Theirs) -> Theirs:
    words = {letter: word for word, letter in _WORDS.items()}
    layers = pattern_layers(setting(description, "hybrid_override_pattern"))
    share = setting(description, "rotary_percent")
    rotated = {} if share == 1 else {"rotary_dim": round(theirs["head_dim"] * share)}
    factors = {
        f"{kind}_{letter}_factor": factor
        for name, letter in _FACTORS.items()
        for kind, factor in zip(_KINDS, setting(description, name), strict=True)
    }
    kinds = [words[layer[0]] for layer in layers]
    return {"layer_types": kinds, **rotated, **factors}


def _table(description: Description) -> Table:
    layers = pattern_layers(setting(description, "hybrid_override_pattern"))
    layers_of = {
        letter: tuple(i for i, layer in enumerate(layers) if letter in layer) for letter in "L*"
    }
    ours, theirs = "blocks.*.lightning.", "model.layers.*.self_attn."
    qkv = tuple(f"{ours}in_proj.{part}.weight" for part in "qkv")
    heads = settings(description).num_attention_heads
    names = {"in_proj.z": "output_gate", "norm": "norm", "out_proj": "out_proj"}
    norm = NORMS["attention_norm"]
    attention = attention_rules(description, {"attention_norm": norm})
    lightning = [
        Rule("blocks.*.lightning_norm.weight", f"model.layers.*.{norm}.weight"),
        Rule(qkv, f"{theirs}qkv_proj.weight", groups=heads),
        *(Rule(f"{ours}{a}.weight", f"{theirs}{b}.weight") for a, b in names.items()),
    ]
    moe = "block_sparse_moe."
    rules = [
        *(replace(rule, layers=layers_of["L"]) for rule in lightning),
        *(replace(rule, layers=layers_of["*"]) for rule in attention),
        Rule("blocks.*.mlp_norm.weight", f"model.layers.*.{NORMS['mlp_norm']}.weight"),
        Rule("blocks.*.moe.router.weight", f"model.layers.*.{moe}gate.weight"),
        *gated_rules("moe.experts.*.", f"{moe}experts.*.", names=("w1", "w3", "w2")),
    ]
    return Table(
        around(description, rules),
        len(layers),
        expert_setting(description, "num_experts"),
        droppable=tuple(f"*.self_attn.{name}" for name in _COMPUTED),
        copies=tied_copies(description),
    )


FAMILY = Decoder(
    model_type="minimax",
    architecture="MiniMaxForCausalLM",
    fixed={"norm_placement": "post"},
    absent={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.001,
        "max_position_embeddings": 131072,
    },
    unread=("block_size",),
    parts=(
        FieldRule(
            covers=("hybrid_override_pattern", *_FACTORS),
            read=_read_layers,
            write=_write_layers,
            keep=("layer_types",),
        ),
        WINDOW,
    ),
    experts=FieldRule(read=mixtral.read_experts, write=mixtral.write_experts),
    layers=("LE", "*E"),
    partial=1.0,
    theta=1e6,
    normalize=_normalize,
    weights=_table,
    renames=mixtral.renames,
)
