"""Gemma 4, its text model: wider heads in layers without a window, vectors for each layer.

Models with experts are refused, as their experts run in parallel to a dense MLP, with separate
norms.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import (
    Decoder,
    Description,
    FieldRule,
    Theirs,
    decoder_table,
    pair,
)
from mcore_ckpt.families.common.fields import Fields, setting, settings
from mcore_ckpt.families.common.layer_types import FULL, LOCAL, windows
from mcore_ckpt.families.dense import gemma2
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.logical_tensors import head_dim, layer_config, qkv_parts

_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_ROPE = {
    LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""Rotary parameters that transformers assumes if config.json has none."""
_OVERRIDES = {
    "head_dim": "global_head_dim",
    "num_key_value_heads": "num_global_key_value_heads",
}


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace sizes for each layer by sizes for all layers without a window."""
    normalized = dict(config)
    stated = normalized.pop("per_layer_config", None)
    layers = stated or {}
    sizes_of_layers = list(layers.values())
    if any(
        one != sizes_of_layers[0] or not one.keys() <= _OVERRIDES.keys()
        for one in sizes_of_layers
    ):
        raise ValueError(
            f"config.json has per_layer_config={layers!r}, which mcore cannot represent here: "
            "only one head_dim and num_key_value_heads, of all layers of full attention."
        )
    if stated is not None:  # overrides the fields for all layers without a window
        sizes = sizes_of_layers[0] if sizes_of_layers else {}
        normalized["global_head_dim"] = sizes.get("head_dim", normalized.get("head_dim"))
        normalized["num_global_key_value_heads"] = sizes.get("num_key_value_heads")
    elif not normalized.get("attention_k_eq_v"):
        normalized["num_global_key_value_heads"] = None
    rows, vocab_size = (
        normalized.pop("vocab_size_per_layer_input", None),
        normalized.get("vocab_size"),
    )
    if normalized.get("hidden_size_per_layer_input") != 0 and rows not in (None, vocab_size):
        raise ValueError(
            f"config.json has vocab_size_per_layer_input={rows}, which mcore cannot represent "
            f"here: only vocab_size, {vocab_size}."
        )
    types = list(normalized.get("layer_types") or ())
    if types:  # the last layer never has a window
        normalized["layer_types"] = [*types[:-1], FULL]
    if sizes_of_layers and sorted(map(int, layers)) != [
        i for i, one in enumerate(types) if one == FULL
    ]:
        raise ValueError(
            "config.json has per_layer_config for other layers than full_attention: remove "
            "them."
        )
    rope = normalized.get("rope_parameters") or _ROPE
    local = dict(rope.get(LOCAL) or _ROPE[LOCAL])
    full = dict(rope.get(FULL) or _ROPE[FULL])
    if local.pop("rope_type", "default") != "default" or local.keys() - {"rope_theta"}:
        raise ValueError(
            f"config.json has rope_parameters[{LOCAL!r}]={rope[LOCAL]!r}, which mcore cannot "
            "represent here: only a base (--rotary-base-local)."
        )
    return normalized | {"rope_parameters": full, "rope_local_base_freq": local["rope_theta"]}


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    groups = fields.maybe("num_global_key_value_heads")
    width = fields.take("global_head_dim", 512)
    fields_read = {
        "rotary_base_local": float(fields.take("rope_local_base_freq")),
        "global_kv_channels": width if width != ours["kv_channels"] else 0,
        "global_num_query_groups": groups or 0,
        "attention_k_eq_v": fields.take("attention_k_eq_v", False),
        "softmax_scale": 1.0,
        "final_logit_softcapping": fields.maybe("final_logit_softcapping") or 0.0,
    }
    return (
        fields_read
        if ours["window_size"][0] >= 0
        else _without_windows(fields_read, ours, width)
    )


def _without_windows(
    fields_read: dict[str, Any], ours: dict[str, Any], width: int
) -> dict[str, Any]:
    if fields_read["attention_k_eq_v"]:
        raise ValueError("config.json has attention_k_eq_v without layers with a window.")
    ours["kv_channels"] = width
    local = ("rotary_base_local", "global_kv_channels", "global_num_query_groups")
    return {name: value for name, value in fields_read.items() if name not in local}


def _write(description: Description, theirs: Theirs) -> Theirs:
    config = settings(description)
    if config.softmax_scale != 1.0:
        raise ValueError(f"it cannot express --softmax-scale {config.softmax_scale}: only 1")
    full = theirs["rope_parameters"]
    del theirs["rope_scaling"], theirs["rope_theta"]
    theirs.pop("partial_rotary_factor", None)
    local = {"rope_type": "default", "rope_theta": config.rotary_base_local or 10000.0}
    sizes = {
        "head_dim": config.global_kv_channels or head_dim(config),
        "num_key_value_heads": config.global_num_query_groups or None,
    }
    # Outside of per_layer_config, transformers reads num_global_key_value_heads only together
    # with attention_k_eq_v.
    by_layer = config.global_num_query_groups and not config.attention_k_eq_v
    layers = {
        "per_layer_config": {
            str(layer): sizes
            for layer, kind in enumerate(theirs["layer_types"])
            if kind == FULL
        }
    }
    return (layers if by_layer else {}) | {
        "rope_parameters": {LOCAL: local, FULL: full},
        **{_OVERRIDES[name]: value for name, value in sizes.items()},
        "attention_k_eq_v": config.attention_k_eq_v,
        "vocab_size_per_layer_input": theirs["vocab_size"],
        "final_logit_softcapping": config.final_logit_softcapping or None,
        "sliding_window": theirs.get("sliding_window") or 512,
    }


_SIZES = FieldRule(
    covers=(
        *("rotary_base_local", "global_kv_channels", "global_num_query_groups"),
        *("attention_k_eq_v", "softmax_scale", "final_logit_softcapping"),
    ),
    read=_read,
    write=_write,
)


def _table(description: Description) -> Table:
    config, count = settings(description), setting(description, "num_layers")
    at, outside = "model.layers.*.", "per_layer_embedding."
    extra = {"output_scale.weight": "layer_scalar"}
    norms = dict(_NORMS)
    ends: list[Rule] = []
    if config.per_layer_embedding_size:
        extra |= {
            "layer_input.gate.weight": "per_layer_input_gate.weight",
            "layer_input.proj.weight": "per_layer_projection.weight",
        }
        norms["layer_input_post_norm"] = "post_per_layer_input_norm"
        ends = [
            Rule(f"{outside}table.weight", "model.embed_tokens_per_layer.weight"),
            Rule(f"{outside}proj.weight", "model.per_layer_model_projection.weight"),
            Rule(f"{outside}norm.weight", "model.per_layer_projection_norm.weight"),
        ]
    table = decoder_table(
        description,
        norms=norms,
        extra=[Rule(f"blocks.*.{a}", at + b) for a, b in extra.items()],
    )
    parts = [qkv_parts(layer_config(config, layer)) for layer in range(count)]
    rules = []
    for rule in table.rules:
        # Layers that reuse keys of other layers, or keys as values, lack some tensors.
        part = rule.theirs.removeprefix(f"{at}self_attn.")[:1]
        if rule.theirs.startswith(f"{at}self_attn.") and part in "kv":
            has_part = tuple(
                layer for layer, layer_parts in enumerate(parts) if part in layer_parts
            )
            rules.append(replace(rule, layers=has_part))
        else:
            rules.append(rule)
    return replace(table, rules=(*rules, *ends))


FAMILY = Decoder(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    fixed={
        "normalization": "RMSNorm",
        "norm_placement": "sandwich",
        "swiglu": False,
        "geglu": True,
        "qk_layernorm": True,
        "value_norm": True,
        "layer_output_scale": True,
    },
    absent={
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
    },
    # Tokens of images see later ones; there are none in text.
    refused={"use_bidirectional_attention": "vision", "enable_moe_block": False},
    parts=(
        gemma2.ATTENTION_BIAS,
        gemma2.EMBEDDING,
        windows(6),
        _SIZES,
        pair("per_layer_embedding_size", "hidden_size_per_layer_input", 256),
        pair("num_kv_shared_layers", "num_kv_shared_layers", 0),
        pair("use_double_wide_mlp", "use_double_wide_mlp", False),
    ),
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    stretched_layers=FULL,
    theta=1e6,
    partial=1.0,
    normalize=_normalize,
    weights=_table,
)
