"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts in all."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mcore_ckpt.families.common.decoder import (
    ATTENTION_BIAS,
    NORMS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    around,
    gated_rules,
    qk_norm_rules,
    tied_copies,
)
from mcore_ckpt.families.common.fields import (
    DEFAULTS,
    PLAIN_ROUTING,
    Fields,
    expert_setting,
    require_routing,
    setting,
    settings,
)
from mcore_ckpt.families.recurrent.mamba_parts import HYBRID
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.layer_patterns import join_layers, pattern_layers
from mcore_models.logical_tensors import delta_sizes

_DELTA_NET = tuple(name for name in DEFAULTS if name.startswith("linear_"))
"""Sizes of gated delta nets, with equal names on both sides."""

_WORDS = {"linear_attention": "G", "full_attention": "*"}
_EXPERTS = {
    "num_experts": ("num_experts", 512),
    "moe_router_topk": ("num_experts_per_tok", 10),
    "moe_ffn_hidden_size": ("moe_intermediate_size", 512),
    "moe_shared_expert_intermediate_size": ("shared_expert_intermediate_size", 512),
    "moe_aux_loss_coeff": ("router_aux_loss_coef", 0.001),
}
_ROUTING = PLAIN_ROUTING | {"moe_shared_expert_gate": True, "moe_input_jitter_eps": 0.0}


def read_mixers(fields: Fields, ours: dict[str, Any], half: str = "-") -> dict[str, Any]:
    """Return our sizes of delta nets, and the pattern of layers with one feed-forward half.

    Args:
        fields: fields of the config.json.
        ours: our fields read so far.
        half: letter of the feed-forward half.
    """
    every = fields.take("full_attention_interval", 4)
    kinds = fields.take("layer_types", [])
    letters = [_WORDS[kind] for kind in kinds] or [
        "G" if (layer + 1) % every else "*" for layer in range(ours["num_layers"])
    ]
    return {
        **{name: fields.take(name, DEFAULTS[name]) for name in _DELTA_NET},
        "hybrid_override_pattern": join_layers(letter + half for letter in letters),
    }


def write_mixers(description: Description, _: Theirs) -> Theirs:
    """Return their sizes of delta nets and the kind of each layer."""
    layers = pattern_layers(setting(description, "hybrid_override_pattern"))
    words = {letter: word for word, letter in _WORDS.items()}
    return {
        **{name: setting(description, name) for name in _DELTA_NET},
        "layer_types": [words[layer[0]] for layer in layers],
    }


def mixers(half: str) -> FieldRule:
    """Return the rule of layers with delta nets or attention and this feed-forward half."""
    return FieldRule(
        covers=(*HYBRID, *_DELTA_NET),
        read=partial(read_mixers, half=half),
        write=write_mixers,
        keep=("layer_types",),
    )


def _read_layers(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    mixer_fields = read_mixers(fields, ours)
    step, dense = fields.take("decoder_sparse_step", 1), fields.take("mlp_only_layers", [])
    layers = pattern_layers(mixer_fields["hybrid_override_pattern"])
    halves = ("-" if i in dense or (i + 1) % step else "E" for i in range(len(layers)))
    mixed = join_layers(one[0] + half for one, half in zip(layers, halves, strict=True))
    return mixer_fields | {"hybrid_override_pattern": mixed}


def _write_layers(description: Description, theirs: Theirs) -> Theirs:
    layers = pattern_layers(setting(description, "hybrid_override_pattern"))
    return write_mixers(description, theirs) | {
        "mlp_only_layers": [i for i, layer in enumerate(layers) if layer[1] == "-"],
        "decoder_sparse_step": 1,
    }


def read_experts(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    """Return our fields for routed experts and a gated shared expert."""
    moe = {name: fields.take(*there) for name, there in _EXPERTS.items()}
    moe |= {
        "moe_router_pre_softmax": not fields.take("norm_topk_prob", True),
        "moe_shared_expert_gate": True,
    }
    if not moe["num_experts"]:
        ours["hybrid_override_pattern"] = ours["hybrid_override_pattern"].replace("E", "-")
    return moe if "E" in ours["hybrid_override_pattern"] else {}


def write_experts(description: Description, _: Theirs) -> Theirs:
    """Return their fields for routed experts and a gated shared expert."""
    theirs = {there: expert_setting(description, ours) for ours, (there, _) in _EXPERTS.items()}
    if not theirs["num_experts"]:
        return {"num_experts": 0}
    require_routing(description, _ROUTING)
    width = setting(description, "ffn_hidden_size")
    theirs["moe_intermediate_size"] = theirs["moe_intermediate_size"] or width
    pre = expert_setting(description, "moe_router_pre_softmax")
    return {**theirs, "norm_topk_prob": not pre}


def delta_table(
    description: Description, delta_rules: Callable[[Description, tuple[int, ...]], list[Rule]]
) -> Table:
    """Return the rules of a model with delta nets and gated attention.

    Args:
        description: description of the model.
        delta_rules: returns the rules of delta nets, given the layers that have them.
    """
    config = settings(description)
    layers = pattern_layers(config.hybrid_override_pattern)
    layers_of = {
        letter: tuple(i for i, layer in enumerate(layers) if letter in layer)
        for letter in "G*E-"
    }
    norms = {"delta_net_norm": "G", "attention_norm": "*"}
    before = NORMS["attention_norm"]
    rules = [
        Rule(
            f"blocks.*.{norm}.weight", f"model.layers.*.{before}.weight", layers=layers_of[one]
        )
        for norm, one in norms.items()
    ]
    rules += delta_rules(description, layers_of["G"])
    rules += _attention_rules(description, layers_of["*"])
    rules.append(Rule("blocks.*.mlp_norm.weight", f"model.layers.*.{NORMS['mlp_norm']}.weight"))
    mlp = "model.layers.*.mlp."
    rules += gated_rules("mlp.", "mlp.", layers_of["-"])
    shared_gate = "blocks.*.moe.shared.token_gate.weight"
    rules += [
        Rule("blocks.*.moe.router.weight", f"{mlp}gate.weight", layers=layers_of["E"]),
        *gated_rules("moe.shared.", "mlp.shared_expert.", layers_of["E"]),
        Rule(shared_gate, f"{mlp}shared_expert_gate.weight", layers=layers_of["E"]),
        *gated_rules("moe.experts.*.", "mlp.experts.*.", layers_of["E"]),
    ]
    return Table(
        around(description, rules),
        len(layers),
        expert_setting(description, "num_experts"),
        droppable=("mtp.*",),
        copies=tied_copies(description),
    )


def _delta_rules(description: Description, layers: tuple[int, ...]) -> list[Rule]:
    """Return the rules of gated delta nets; their rows are grouped by key head."""
    sizes = delta_sizes(settings(description))
    ours, there = "blocks.*.delta_net.", "model.layers.*.linear_attn."
    heads = sizes.value_heads
    fused = {
        "in_proj_qkvz": ("qkvz", (sizes.keys, sizes.keys, sizes.values, sizes.values)),
        "in_proj_ba": ("ba", (heads, heads)),
    }
    rules = [
        Rule(
            tuple(f"{ours}in_proj.{part}.weight" for part in parts),
            f"{there}{name}.weight",
            sizes=rows,
            layers=layers,
            groups=sizes.key_heads,
        )
        for name, (parts, rows) in fused.items()
    ]
    return rules + kernel_rules(description, layers)


def kernel_rules(description: Description, layers: tuple[int, ...]) -> list[Rule]:
    """Return the rules of a delta net's convolution, decays, norm and last matrix."""
    sizes = delta_sizes(settings(description))
    ours, there = "blocks.*.delta_net.", "model.layers.*.linear_attn."
    rows = (sizes.keys, sizes.keys, sizes.values)
    conv = tuple(f"{ours}conv1d.{part}.weight" for part in "qkv")
    names = ("dt_bias", "A_log", "norm.weight", "out_proj.weight")
    return [
        Rule(conv, f"{there}conv1d.weight", sizes=rows, layers=layers),
        *(Rule(f"{ours}{name}", f"{there}{name}", layers=layers) for name in names),
    ]


def _attention_rules(description: Description, layers: tuple[int, ...]) -> list[Rule]:
    """Return the rules of gated attention: each head's query rows, then its gate rows."""
    config = settings(description)
    ours, there = "blocks.*.attention.", "model.layers.*.self_attn."
    rules = []
    for kind in ("weight", "bias") if config.add_attention_bias else ("weight",):
        gated = tuple(f"{ours}qkv.{part}.{kind}" for part in ("q", "gate"))
        rules.append(Rule(gated, f"{there}q_proj.{kind}", groups=config.num_attention_heads))
        rules += [
            Rule(f"{ours}qkv.{part}.{kind}", f"{there}{part}_proj.{kind}") for part in "kv"
        ]
        rules.append(Rule(f"{ours}proj.{kind}", f"{there}o_proj.{kind}"))
    return [replace(rule, layers=layers) for rule in rules + qk_norm_rules()]


_LAYERS = FieldRule(
    covers=(*HYBRID, *_DELTA_NET), read=_read_layers, write=_write_layers, keep=("layer_types",)
)

FAMILY = Decoder(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    fixed={"qk_layernorm": True, "attention_output_gate": True, "apply_layernorm_1p": True},
    absent={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "intermediate_size": 5632,
        "max_position_embeddings": 32768,
    },
    parts=(ATTENTION_BIAS, _LAYERS),
    experts=FieldRule(read=read_experts, write=write_experts),
    layers=("GE", "G-", "*E", "*-"),
    partial=0.25,
    weights=partial(delta_table, delta_rules=_delta_rules),
)
