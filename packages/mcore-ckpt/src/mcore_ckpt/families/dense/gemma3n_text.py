"""The text model of Gemma 3n: several residual streams, per-layer embeddings, sparse gates."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import Description, FieldRule, Theirs, pair
from mcore_ckpt.families.common.fields import Fields, settings
from mcore_ckpt.families.common.layer_types import windows
from mcore_ckpt.families.dense import gemma2, gemma3_text, gemma4_text
from mcore_ckpt.mapping.rules import Rule, Table

_SPARSE_LAYERS, _SHARE = 10, 0.95
"""If config.json has no pattern: the number of first layers with sparse gates, in a model with
more layers, and the share of their gates that are cut."""
_LAYER = {
    "altup.router_norm.weight": "altup.router_norm.weight",
    "altup.router.weight": "altup.modality_router.weight",
    "altup.prediction_coefs.weight": "altup.prediction_coefs.weight",
    "altup.correction_coefs.weight": "altup.correction_coefs.weight",
    "altup.gating_scale": "altup.correct_output_scale",
    "laurel.left.weight": "laurel.linear_left.weight",
    "laurel.right.weight": "laurel.linear_right.weight",
    "laurel.norm.weight": "laurel.post_laurel_norm.weight",
}
"""Logical names of a layer's tensors of AltUp and LAuReL, and their names in the checkpoint."""


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    normalized = dict(gemma3_text.FAMILY.normalize(config))
    widths = normalized.get("intermediate_size")
    if isinstance(widths, list):
        if len(set(widths)) != 1 or len(widths) != normalized.get("num_hidden_layers", 35):
            raise ValueError(
                f"config.json has intermediate_size={widths!r}: mcore supports only one width "
                "for all layers of gemma3n_text, as one number or once for each layer."
            )
        normalized["intermediate_size"] = widths[0]
    return normalized


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    depth, rows = ours["num_layers"], fields.maybe("vocab_size_per_layer_input", 262144)
    num_sparse = _SPARSE_LAYERS * (depth > _SPARSE_LAYERS)
    shares = fields.maybe("activation_sparsity_pattern")
    if shares is None:
        shares = [_SHARE] * num_sparse + [0.0] * (depth - num_sparse)
    return {
        "per_layer_embedding_vocab_size": rows,
        "activation_sparsity_pattern": list(map(float, shares)) if any(shares) else [],
        "final_logit_softcapping": fields.maybe("final_logit_softcapping", 30.0) or 0.0,
    }


def _write(description: Description, theirs: Theirs) -> Theirs:
    config, depth = settings(description), theirs["num_hidden_layers"]
    for name in ("altup_num_inputs", "laurel_rank", "per_layer_embedding_size"):
        if not getattr(config, name):
            raise ValueError(f"it cannot express --{name.replace('_', '-')} 0: only 1 or more")
    shares = list(config.activation_sparsity_pattern)
    rows = config.per_layer_embedding_vocab_size or theirs["vocab_size"]
    return {
        "intermediate_size": [theirs["intermediate_size"]] * depth,
        "vocab_size_per_layer_input": rows,
        "activation_sparsity_pattern": shares or [0.0] * depth,
        "final_logit_softcapping": config.final_logit_softcapping or None,
        "sliding_window": theirs.get("sliding_window") or 512,
    }


_OWN = FieldRule(
    covers=(
        *("per_layer_embedding_vocab_size", "activation_sparsity_pattern"),
        "final_logit_softcapping",
    ),
    read=_read,
    write=_write,
)


def _table(description: Description) -> Table:
    config, table = settings(description), gemma4_text.FAMILY.table(description)
    rules = [rule for rule in table.rules if not rule.theirs.endswith(".layer_scalar")]
    rules += [Rule(f"blocks.*.{a}", f"model.layers.*.{b}") for a, b in _LAYER.items()]
    rules += [
        Rule(f"{name}.{stream}.weight", f"model.{name}.{stream}.weight")
        for name in ("altup_projections", "altup_unembed_projections")
        for stream in range(config.altup_num_inputs - 1)
    ]
    # Releases have projections of keys and values also for layers that read the keys and values
    # of another layer. No code reads these tensors.
    sharing = range(config.num_layers - config.num_kv_shared_layers, config.num_layers)
    unread = (
        f"model.layers.{layer}.self_attn.{name}.*"
        for layer in sharing
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )
    return replace(table, rules=tuple(rules), droppable=(*table.droppable, *unread))


FAMILY = replace(
    gemma3_text.FAMILY,
    model_type="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    fixed={**gemma4_text.FAMILY.fixed, "layer_output_scale": False, "softmax_scale": 1.0},
    absent={
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "sliding_window": 512,
    },
    only={"altup_active_idx": 0, "altup_correct_scale": True},
    # Bounds of coefficients, which transformers applies in training only.
    unread=(*gemma2.FAMILY.unread, "altup_coef_clip"),
    parts=(
        gemma2.ATTENTION_BIAS,
        gemma2.EMBEDDING,
        windows(5),
        gemma3_text.ROTARY,
        _OWN,
        pair("per_layer_embedding_size", "hidden_size_per_layer_input", 256),
        pair("num_kv_shared_layers", "num_kv_shared_layers", 15),
        pair("altup_num_inputs", "altup_num_inputs", 4),
        pair("laurel_rank", "laurel_rank", 64),
    ),
    normalize=_normalize,
    weights=_table,
)
