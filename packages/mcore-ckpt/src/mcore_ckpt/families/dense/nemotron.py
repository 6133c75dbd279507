"""Nemotron (3, 4, Minitron): LayerNorm around one, squared ReLU, part of each head rotated."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import decoder_table, read_common, write_common
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require, setting

table = decoder_table

_FIXED: dict[str, Any] = {
    "normalization": "LayerNorm",
    "apply_layernorm_1p": True,
    "swiglu": False,
    "squared_relu": True,
}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    # The family rotates half of each head where nothing is said.
    rope = config.get("rope_parameters") or {}
    partial = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 0.5
    absent = {"norm_eps": 1e-5, "initializer_range": 0.0134}
    fields = Fields({**config, "partial_rotary_factor": partial}, absent=absent)
    fields.must_be("hidden_act", "relu2")
    biased = fields.take("attention_bias", False)
    fields.must_be("mlp_bias", False)
    ours = read_common(fields, partial=True) | _FIXED
    if biased:
        ours["add_attention_bias"] = True
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, **_FIXED, qk_layernorm=False, window_size=(-1, 0))
    require(description, add_bias_linear=False, add_qkv_bias=False)
    theirs = write_common(
        description, "NemotronForCausalLM", partial=True, says=("add_attention_bias",)
    )
    theirs["norm_eps"] = theirs.pop("rms_norm_eps")
    theirs["partial_rotary_factor"] = theirs.get("partial_rotary_factor", 1.0)
    theirs["rope_parameters"]["partial_rotary_factor"] = theirs["partial_rotary_factor"]
    theirs |= {"hidden_act": "relu2", "mlp_bias": False}
    theirs["attention_bias"] = setting(description, "add_attention_bias")
    return {"model_type": "nemotron", **theirs}
