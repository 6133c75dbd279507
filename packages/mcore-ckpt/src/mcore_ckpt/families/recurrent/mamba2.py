"""Mamba-2: only state-space layers, whose input projection fuses five matrices."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import checked_layers
from mcore_ckpt.families.common.fields import (
    REQUIRED,
    Fields,
    no_experts,
    read_pairs,
    refuse_variants,
    require,
    setting,
    settings,
)
from mcore_ckpt.families.recurrent.mamba_parts import (
    HYBRID,
    MAMBA_PAIRS,
    below_backbone,
    expansion,
    mamba_rules,
    read_limit,
    write_limit,
)
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.logical_tensors import mamba_sizes

PAIRS = (
    ("num_layers", "num_hidden_layers", REQUIRED),
    ("hidden_size", "hidden_size", REQUIRED),
    ("mamba_num_heads", "num_heads", 128),
    ("mamba_head_dim", "head_dim", 64),
    ("mamba_state_dim", "state_size", 128),
    ("mamba_chunk_size", "chunk_size", 256),
    ("init_method_std", "initializer_range", 0.1),
    *MAMBA_PAIRS,
)

_FIXED: dict[str, Any] = {
    "position_embedding_type": "none",
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,
}


_OLD_EMBEDDING = "backbone.embedding.weight"
_RELEASE = {
    "head_dim": ("headdim", 64),
    "state_size": ("d_state", 128),
    "n_groups": ("ngroups", 1),
    "conv_kernel": ("d_conv", 4),
    "expand": ("expand", 2),
    "chunk_size": ("chunk_size", 256),
}
"""Fields of ``ssm_cfg`` in state-spaces' releases, and their defaults."""


def released(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of a state-spaces release in the fields of transformers."""
    if "model_type" in config or "ssm_cfg" not in config:
        return config
    inner = dict(config["ssm_cfg"])
    if inner.pop("layer", "Mamba1") != "Mamba2" or config.get("attn_layer_idx"):
        raise ValueError(
            "config.json has an ssm_cfg of other layers than Mamba2, which is not supported."
        )
    if config.get("d_intermediate") or not config.get("rms_norm", True):
        raise ValueError(
            "config.json has d_intermediate or no rms_norm, which is not supported."
        )
    sizes = {field: inner.pop(name, default) for field, (name, default) in _RELEASE.items()}
    if inner:
        raise ValueError(f"config.json has unknown fields in ssm_cfg: {inner}.")
    width, vocab_multiple = config["d_model"], config.get("pad_vocab_size_multiple", 8)
    return {
        "model_type": "mamba2",
        "hidden_size": width,
        "num_hidden_layers": config["n_layer"],
        "vocab_size": -(-config["vocab_size"] // vocab_multiple) * vocab_multiple,
        "num_heads": sizes["expand"] * width // sizes["head_dim"],
        "tie_word_embeddings": config.get("tie_embeddings", True),
        **sizes,
    }


def renames(names: Iterable[str]) -> dict[str, str]:
    """Return the new name of the embedding in older folders, by the old one."""
    return {_OLD_EMBEDDING: "backbone.embeddings.weight"} if _OLD_EMBEDDING in names else {}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description; see ``families``."""
    fields = Fields(config)
    fields.must_be("hidden_act", "silu")
    fields.must_be("rms_norm", True)
    fields.must_be("norm_before_gate", True, False)  # transformers ignores it
    # The model has no attention, but the field is required: one head divides any width.
    ours = read_pairs(fields, PAIRS) | _FIXED | {"num_attention_heads": 1}
    fields.take("expand", 2)  # equals num_heads * head_dim / hidden_size
    ours["hybrid_override_pattern"] = "M" * ours["num_layers"]
    ours["mamba_dt_limit"] = read_limit(fields.take("time_step_limit", (0.0, math.inf)))
    ours["untie_embeddings_and_output_weights"] = not fields.take("tie_word_embeddings", False)
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json; see ``families``."""
    checked_layers(description, "M")
    no_experts(description)
    refuse_variants(description, *HYBRID)
    require(description, **_FIXED, hidden_dropout=0.0)
    config = settings(description)
    return {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "vocab_size": description["vocab_size"],
        **{there: getattr(config, ours) for ours, there, _ in PAIRS},
        "num_heads": mamba_sizes(config).heads,
        "expand": expansion(description),
        "time_step_limit": write_limit(setting(description, "mamba_dt_limit")),
        "hidden_act": "silu",
        "rms_norm": True,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    norm = Rule("blocks.*.mamba_norm.weight", "backbone.layers.*.norm.weight")
    return below_backbone(
        description, [norm, *mamba_rules(description, "backbone.layers.*.mixer.")]
    )
