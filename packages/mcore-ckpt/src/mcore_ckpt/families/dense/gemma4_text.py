"""Gemma 4, its text model: wider heads in layers without a window, vectors for each layer.

Models with experts are refused: theirs run beside a dense MLP, with norms of their own.
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
    """Turn sizes stated for each layer into those of all layers without a window."""
    usual = dict(config)
    stated = usual.pop("per_layer_config", None)
    layers = stated or {}
    found = list(layers.values())
    if any(one != found[0] or not one.keys() <= _OVERRIDES.keys() for one in found):
        raise ValueError(
            f"config.json has per_layer_config={layers!r}, which mcore cannot represent here: "
            "only one head_dim and num_key_value_heads, of all layers of full attention."
        )
    if stated is not None:  # fields of all layers without a window do not count then
        own = found[0] if found else {}
        usual["global_head_dim"] = own.get("head_dim", usual.get("head_dim"))
        usual["num_global_key_value_heads"] = own.get("num_key_value_heads")
    elif not usual.get("attention_k_eq_v"):
        usual["num_global_key_value_heads"] = None
    rows, vocab_size = usual.pop("vocab_size_per_layer_input", None), usual.get("vocab_size")
    if usual.get("hidden_size_per_layer_input") != 0 and rows not in (None, vocab_size):
        raise ValueError(
            f"config.json has vocab_size_per_layer_input={rows}, which mcore cannot represent "
            f"here: only vocab_size, {vocab_size}."
        )
    types = list(usual.get("layer_types") or ())
    if types:  # the last layer has no window, whatever is stated
        usual["layer_types"] = [*types[:-1], FULL]
    if found and sorted(map(int, layers)) != [i for i, one in enumerate(types) if one == FULL]:
        raise ValueError(
            "config.json has per_layer_config of other layers than full_attention."
        )
    rope = usual.get("rope_parameters") or _ROPE
    local = dict(rope.get(LOCAL) or _ROPE[LOCAL])
    full = dict(rope.get(FULL) or _ROPE[FULL])
    if local.pop("rope_type", "default") != "default" or local.keys() - {"rope_theta"}:
        raise ValueError(
            f"config.json has rope_parameters[{LOCAL!r}]={rope[LOCAL]!r}, which mcore cannot "
            "represent here: only a base (--rotary-base-local)."
        )
    return usual | {"rope_parameters": full, "rope_local_base_freq": local["rope_theta"]}


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    groups = fields.maybe("num_global_key_value_heads")
    width = fields.take("global_head_dim", 512)
    found = {
        "rotary_base_local": float(fields.take("rope_local_base_freq")),
        "global_kv_channels": width if width != ours["kv_channels"] else 0,
        "global_num_query_groups": groups or 0,
        "attention_k_eq_v": fields.take("attention_k_eq_v", False),
        "softmax_scale": 1.0,
        "final_logit_softcapping": fields.maybe("final_logit_softcapping") or 0.0,
    }
    return found if ours["window_size"][0] >= 0 else _without_windows(found, ours, width)


def _without_windows(found: dict[str, Any], ours: dict[str, Any], width: int) -> dict[str, Any]:
    if found["attention_k_eq_v"]:
        raise ValueError("config.json has attention_k_eq_v without layers with a window.")
    ours["kv_channels"] = width
    local = ("rotary_base_local", "global_kv_channels", "global_num_query_groups")
    return {name: value for name, value in found.items() if name not in local}


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
    # transformers reads the second of them elsewhere only together with attention_k_eq_v.
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
        # Layers that read keys of others, or whose values are keys, lack some tensors.
        part = rule.theirs.removeprefix(f"{at}self_attn.")[:1]
        if rule.theirs.startswith(f"{at}self_attn.") and part in "kv":
            has_part = tuple(layer for layer, own in enumerate(parts) if part in own)
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
