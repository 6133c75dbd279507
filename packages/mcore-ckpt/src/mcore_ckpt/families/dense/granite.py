"""Granite 3: Llama with factors on embeddings, scores, residual branches and logits.

A model that muP parametrizes is written as one, with the factors of its width.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import decoder_table, read_rms_silu, write_rms_silu
from mcore_ckpt.families.common.defaults import MUP
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require, setting, settings
from mcore_parallel.parametrization import embedding_factor, logits_factor, score_scale

table = decoder_table

_PAIRS = {
    "softmax_scale": "attention_multiplier",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config)
    fields.must_be("mlp_bias", False)
    ours = read_rms_silu(fields) | {
        mine: float(fields.take(there, 1.0)) for mine, there in _PAIRS.items()
    }
    ours["logits_multiplier"] = 1.0 / fields.take("logits_scaling", 1.0)
    ours["add_attention_bias"] = fields.take("attention_bias", False)
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, qk_layernorm=False, add_bias_linear=False, add_qkv_bias=False)
    require(description, window_size=(-1, 0))
    says = (*_PAIRS, *MUP, "logits_multiplier", "add_attention_bias")
    theirs = write_rms_silu(description, "GraniteForCausalLM", says=says)
    own = theirs["head_dim"] ** -0.5
    ours = settings(description)
    factors = {
        "attention_multiplier": score_scale(ours, theirs["head_dim"]) or own,
        "embedding_multiplier": embedding_factor(ours),
        "residual_multiplier": ours.residual_multiplier,
    }
    if tuple(factors.values()) == (own, 1, 1) and logits_factor(ours) == 1:
        raise ValueError("it is a Llama: none of its factors is set")
    return theirs | {
        "model_type": "granite",
        "attention_bias": setting(description, "add_attention_bias"),
        "mlp_bias": False,
        **factors,
        "logits_scaling": round(1.0 / logits_factor(ours), 12),
    }
