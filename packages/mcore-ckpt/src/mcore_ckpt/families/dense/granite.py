"""Granite 3: Llama with factors on embeddings, scores, residual branches and logits.

A model with muP parametrization is written as a Granite with the factors of its width.
"""

from typing import Any

from mcore_ckpt.families.common.decoder import (
    Decoder,
    Description,
    FieldRule,
    Theirs,
)
from mcore_ckpt.families.common.fields import DEFAULTS, Fields, setting, settings
from mcore_ckpt.families.dense import llama
from mcore_models.mup import embedding_factor, logits_factor, score_scale

FACTORS = {
    "softmax_scale": "attention_multiplier",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
}
"""Our fields of factors, and theirs."""


def read_factors(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    """Read the factors; their factor on logits is a divisor."""
    ours = {mine: float(fields.take(there, 1.0)) for mine, there in FACTORS.items()}
    return ours | {"logits_multiplier": 1.0 / fields.take("logits_scaling", 1.0)}


def write_factors(description: Description, theirs: Theirs) -> Theirs:
    """Write the factors of a model that muP does not parametrize."""
    return {
        **{there: setting(description, mine) for mine, there in FACTORS.items()},
        "attention_multiplier": setting(description, "softmax_scale")
        or theirs["head_dim"] ** -0.5,
        "logits_scaling": round(1.0 / setting(description, "logits_multiplier"), 12),
    }


PLAIN_FACTORS = FieldRule(
    covers=(*FACTORS, "logits_multiplier"), read=read_factors, write=write_factors
)
"""Factors of families with experts."""


def _write(description: Description, theirs: Theirs) -> Theirs:
    default_scale = theirs["head_dim"] ** -0.5
    ours = settings(description)
    factors = {
        "attention_multiplier": score_scale(ours, theirs["head_dim"]) or default_scale,
        "embedding_multiplier": embedding_factor(ours),
        "residual_multiplier": ours.residual_multiplier,
    }
    if tuple(factors.values()) == (default_scale, 1, 1) and logits_factor(ours) == 1:
        raise ValueError("it is a Llama, as none of its factors is set")
    return {**factors, "logits_scaling": round(1.0 / logits_factor(ours), 12)}


_MUP = ("use_mup", *(name for name in DEFAULTS if name.startswith("mup_")))
_COVERS = (*FACTORS, *_MUP, "logits_multiplier")

FAMILY = Decoder(
    model_type="granite",
    architecture="GraniteForCausalLM",
    parts=(FieldRule(covers=_COVERS, read=read_factors, write=_write), llama.BIASES),
)
