"""OLMo-2: norms after each half instead of before, and on whole queries and keys."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import decoder_table, read_rms_silu, write_rms_silu
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.mapping.rules import Table

NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""Our norms and theirs."""

FIXED: dict[str, Any] = {
    "norm_placement": "output",
    "qk_layernorm": True,
    "qk_norm_width": "layer",
}
"""What OLMo-2 and OLMo-3 have."""

ABSENT = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
"""What fields mean that are not there."""


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, absent=ABSENT)
    ours = read_rms_silu(fields) | FIXED
    ours["add_attention_bias"] = fields.take("attention_bias", False)
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    require(description, window_size=(-1, 0))
    return {"model_type": "olmo2", **write_olmo(description, "Olmo2ForCausalLM")}


def write_olmo(
    description: Mapping[str, Any], architecture: str, says: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Write what OLMo-2 and OLMo-3 say alike.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, **FIXED, add_bias_linear=False, add_qkv_bias=False)
    says = (*FIXED, "add_attention_bias", *says)
    theirs = write_rms_silu(description, architecture, says=says)
    own = theirs["hidden_size"] // theirs["num_attention_heads"]
    if theirs.pop("head_dim") != own:
        raise ValueError(f"it cannot say --kv-channels: only {own}, hidden size / heads")
    return theirs | {"attention_bias": setting(description, "add_attention_bias")}


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    return decoder_table(description, norms=NORMS)
