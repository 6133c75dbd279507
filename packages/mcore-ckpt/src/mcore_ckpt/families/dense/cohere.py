"""Command-R: one LayerNorm without a bias feeds attention and feed-forward layer together."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import decoder_table, read_common, write_common
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.mapping.rules import Table

FIXED: dict[str, Any] = {
    "normalization": "LayerNorm",
    "norm_bias": False,
    "parallel_residual": "one_norm",
    "rotary_interleaved": True,
}
"""What all Command-Rs have."""

ABSENT = {"logit_scale": 0.0625, "tie_word_embeddings": True, "layer_norm_eps": 1e-5}
"""What fields mean that are not there."""


def read_cohere(fields: Fields, *, theta: float) -> dict[str, Any]:
    """Read what all Command-Rs say alike.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields.must_be("hidden_act", "silu")
    # Norms on heads have a weight for each of them, which we do not have.
    fields.must_be("use_qk_norm", False)
    ours = read_common(fields, epsilon="layer_norm_eps", theta=theta) | FIXED
    return ours | {
        "logits_multiplier": float(fields.take("logit_scale")),
        "add_attention_bias": fields.take("attention_bias", False),
    }


def write_cohere(
    description: Mapping[str, Any], architecture: str, says: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Write what all Command-Rs say alike.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, **FIXED, swiglu=True, apply_layernorm_1p=False, qk_layernorm=False)
    require(description, add_bias_linear=False, add_qkv_bias=False)
    says = (*FIXED, "logits_multiplier", "add_attention_bias", *says)
    theirs = write_common(description, architecture, says=says)
    theirs["layer_norm_eps"] = theirs.pop("rms_norm_eps")
    return theirs | {
        "logit_scale": setting(description, "logits_multiplier"),
        "attention_bias": setting(description, "add_attention_bias"),
    }


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, absent=ABSENT)
    ours = read_cohere(fields, theta=5e5)
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    require(description, window_size=(-1, 0))
    theirs = write_cohere(description, "CohereForCausalLM")
    return {"model_type": "cohere", **theirs, "use_qk_norm": False}


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    return decoder_table(description, norms={"attention_norm": "input_layernorm"})
