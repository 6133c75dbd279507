"""Kimi-Linear: Kimi Delta Attention, latent attention without positions, experts."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import (
    NORMS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    around,
    gated_rules,
    pair,
)
from mcore_ckpt.families.common.fields import Fields, expert_setting, setting
from mcore_ckpt.families.moe.deepseek_v3 import LATENT, SIGMOID_EXPERTS, latent_rules
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.layer_patterns import join_layers, pattern_layers

_PADDING = 163839
"""Padding token that transformers assumes if config.json has none. transformers refuses a
smaller vocabulary, unless ``pad_token_id`` is null."""
_LETTERS = {
    "layer_types": {"linear_attention": "K", "full_attention": "*"},
    "mlp_layer_types": {"dense": "-", "sparse": "E"},
}
"""Lists of config.json with a word for each layer, and the letter of each word in a pattern.

A layer's letters are in the order of the lists.
"""
_SIZES = {
    "linear_num_heads": ("linear_num_key_heads", "linear_num_value_heads"),
    "linear_head_dim": ("linear_key_head_dim", "linear_value_head_dim"),
}
"""A size of Kimi Delta Attention in transformers, and the two options that must have it."""
_OF_EXPERTS = (
    *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
    *("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob", "aux_loss_alpha"),
)
"""Fields of experts, by DeepSeek's names, which a model without experts does not use."""
_RELEASED = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Names of sizes in transformers, and in ``linear_attn_config`` of the release."""
_NAMES = {
    **{f"in_proj.{part}.weight": f"{part}_proj.weight" for part in "qkvb"},
    **{f"conv1d.{part}.weight": f"{part}_conv1d.weight" for part in "qkv"},
    "decay_down.weight": "f_a_proj.weight",
    "decay_up.weight": "f_b_proj.weight",
    "gate_down.weight": "g_a_proj.weight",
    "gate_up.weight": "g_b_proj.weight",
    **{name: name for name in ("dt_bias", "A_log")},
    "norm.weight": "o_norm.weight",
    "out_proj.weight": "o_proj.weight",
}
"""Logical names of Kimi Delta Attention's tensors, and their names in the checkpoint."""


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with transformers' fields in place of the release's.

    The release has ``linear_attn_config``, whose lists count layers from 1, and
    ``first_k_dense_replace``.
    """
    usual = dict(config)
    count = config["num_hidden_layers"]
    if released := usual.pop("linear_attn_config", None):
        usual = {name: released[theirs] for name, theirs in _RELEASED.items()} | usual
        kinds = [
            "full_attention" if layer in released["full_attn_layers"] else "linear_attention"
            for layer in range(1, count + 1)
        ]
        usual.setdefault("layer_types", kinds)
    dense = usual.pop("first_k_dense_replace", 1)
    kinds = ["dense" if layer < dense else "sparse" for layer in range(count)]
    usual.setdefault("mlp_layer_types", kinds)
    return usual


def _read_layers(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    letters = []
    for name, letter_of in _LETTERS.items():
        kinds = fields.take(name)
        if len(kinds) != ours["num_layers"] or not set(kinds) <= letter_of.keys():
            raise ValueError(
                f"config.json has {name}={kinds!r}: it must name {' or '.join(letter_of)} for "
                f"each of num_hidden_layers, {ours['num_layers']}."
            )
        letters.append([letter_of[kind] for kind in kinds])
    pattern = join_layers(map("".join, zip(*letters, strict=True)))
    sizes: dict[str, Any] = {}
    for name, options in _SIZES.items():
        sizes |= dict.fromkeys(options, fields.take(name))
    return {"hybrid_override_pattern": pattern, **sizes}


def _write_layers(description: Description, theirs: Theirs) -> Theirs:
    """Return the layers and sizes in transformers' fields and in those of the release.

    Inference engines read the release's ``linear_attn_config``.
    """
    layers = pattern_layers(setting(description, "hybrid_override_pattern"))
    fields: Theirs = {"linear_conv_kernel_dim": theirs["linear_conv_kernel_dim"]}
    for name, (first, second) in _SIZES.items():
        fields[name] = setting(description, first)
        if setting(description, second) != fields[name]:
            raise ValueError(
                f"it cannot express --{first} other than --{second}".replace("_", "-")
            )
    for index, (name, letter_of) in enumerate(_LETTERS.items()):
        word_of = {letter: word for word, letter in letter_of.items()}
        fields[name] = [word_of[layer[index]] for layer in layers]
    fields["linear_attn_config"] = {
        **{released: fields[name] for name, released in _RELEASED.items()},
        "kda_layers": [i for i, layer in enumerate(layers, 1) if "K" in layer],
        "full_attn_layers": [i for i, layer in enumerate(layers, 1) if "*" in layer],
    }
    dense = sum("-" in layer for layer in layers)
    if all("-" in layer for layer in layers[:dense]):
        fields["first_k_dense_replace"] = dense
    if description["vocab_size"] <= _PADDING:
        fields["pad_token_id"] = None
    return fields


def _read_experts(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    if "E" not in ours["hybrid_override_pattern"]:
        for name in _OF_EXPERTS:
            fields.maybe(name)
        return {}
    moe = SIGMOID_EXPERTS.read(fields, ours)
    del moe["moe_layer_freq"]  # the pattern has the layers with experts
    return moe


def _write_experts(description: Description, theirs: Theirs) -> Theirs:
    if not expert_setting(description, "num_experts"):
        return {}
    fields = SIGMOID_EXPERTS.write(description, theirs)
    del fields["first_k_dense_replace"]
    return fields


def _table(description: Description) -> Table:
    layers = pattern_layers(setting(description, "hybrid_override_pattern"))
    layers_of = {
        letter: tuple(i for i, layer in enumerate(layers) if letter in layer)
        for letter in "K*-E"
    }
    prefix, attention = "model.layers.*.", "model.layers.*.self_attn."
    norm = f"{prefix}{NORMS['attention_norm']}.weight"
    rules_of = {
        "K": [
            Rule("blocks.*.kda_norm.weight", norm),
            *(Rule(f"blocks.*.kda.{ours}", attention + name) for ours, name in _NAMES.items()),
        ],
        "*": [Rule("blocks.*.attention_norm.weight", norm), *latent_rules(description)],
    }
    moe = "block_sparse_moe."
    router = {"weight": "gate.weight", "expert_bias": "gate.e_score_correction_bias"}
    rules = [
        *(
            replace(rule, layers=layers_of[letter])
            for letter, letter_rules in rules_of.items()
            for rule in letter_rules
        ),
        Rule("blocks.*.mlp_norm.weight", f"{prefix}{NORMS['mlp_norm']}.weight"),
        *gated_rules("mlp.", "mlp.", layers_of["-"]),
        *(
            Rule(f"blocks.*.moe.router.{ours}", f"{prefix}{moe}{name}", layers=layers_of["E"])
            for ours, name in router.items()
        ),
        *gated_rules("moe.experts.*.", f"{moe}experts.*.", layers_of["E"], ("w1", "w3", "w2")),
    ]
    has_shared = bool(expert_setting(description, "moe_shared_expert_intermediate_size"))
    if has_shared:
        rules += gated_rules("moe.shared.", f"{moe}shared_experts.", layers_of["E"])
    return Table(
        around(description, rules),
        len(layers),
        expert_setting(description, "num_experts"),
        # transformers stores shared experts of width 0.
        droppable=() if has_shared else ("*.shared_experts.*",),
    )


def _renames(names: Collection[str]) -> dict[str, str]:
    """Map names of dense layers as transformers writes them to the release's names."""
    dense = re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj)\.")
    return {name: new for name in names if (new := dense.sub(r".mlp.\1.", name)) != name}


FAMILY = Decoder(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    fixed={
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "position_embedding_type": "none",
        # transformers stores both tables, whatever tie_word_embeddings is.
        "untie_embeddings_and_output_weights": True,
    },
    rotates=False,
    field_names={
        "max_position_embeddings": "model_max_length",
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize",
    },
    absent={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "q_lora_rank": None,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "linear_conv_kernel_dim": 4,
    },
    only={
        "attention_bias": False,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "moe_layer_freq": 1,
    },
    refused={"num_nextn_predict_layers": 0},
    # No layer rotates queries and keys; qk_head_dim is the sum of two other fields.
    unread=("rope_theta", "rope_scaling", "rope_parameters", "qk_head_dim"),
    parts=(
        *LATENT,
        pair("linear_conv_kernel_dim", "linear_conv_kernel_dim", 4),
        FieldRule(
            covers=(
                "hybrid_override_pattern",
                *(option for options in _SIZES.values() for option in options),
            ),
            read=_read_layers,
            write=_write_layers,
            keep=("layer_types",),
        ),
    ),
    experts=FieldRule(read=_read_experts, write=_write_experts),
    layers=("K-", "KE", "*-", "*E"),
    normalize=_normalize,
    weights=_table,
    renames=_renames,
)
