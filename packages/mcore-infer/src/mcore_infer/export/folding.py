"""Scales of inputs that a format has no place for, put into the layer before.

A quantized matrix may want its inputs multiplied by ``pre_quant_scale``. The layer before can
do so: a norm by its gain, ``up_proj`` and ``v_proj`` by the scales of their outputs.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_ckpt.families.common.fields import settings
from mcore_ckpt.formats.quantization import WidenedRows
from mcore_ckpt.formats.quantized_layouts import PRE_QUANT_SCALE, WEIGHT_SCALE
from mcore_models.logical_tensors import head_dim, is_gated, num_kv_heads

_AFTER_NORM = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}


def folded_scales(
    widened: WidenedRows, description: Mapping[str, Any]
) -> dict[str, Float[Tensor, " F"]]:
    """Find what multiplies the rows of which tensors, so that no input needs a scale.

    Returns:
        By name of a gain, of a ``weight_scale``, or of the bias beside it: a factor for each
        of its rows.

    Raises:
        ValueError: if a scale cannot go into the layer before.
    """
    found: dict[str, Tensor] = {}
    for name, entry in widened.stored.entries.items():
        module, _, kind = name.rpartition(".")
        if kind != PRE_QUANT_SCALE:
            continue
        scale = widened.stored.rows(name, 0, entry.shape[0]).float()
        if bool((scale == 1).all()):
            continue
        names, has_cache = widened.stored.entries, widened.plan.kv_cache
        target, why = layer_before(module, names, description, kv_cache=has_cache)
        if why:
            raise _refusal(name, why)
        factor = _factor(module, target, scale, description)
        if target in found and not torch.equal(found[target], factor):
            raise _refusal(name, "what reads the same norm has another")
        found[target] = factor
        bias = f"{target.rpartition('.')[0]}.bias"
        if bias in widened.stored.entries:
            found[bias] = factor
    return found


def layer_before(
    module: str, names: Container[str], description: Mapping[str, Any], *, kv_cache: bool
) -> tuple[str, str]:
    """Return the tensor whose rows take the scale of a module's inputs, or why none does.

    Args:
        module: of a Hugging Face folder.
        names: of the folder's tensors, scales of quantized modules too.
        description: of the model.
        kv_cache: whether there are scales of a cache, which the scale of values would change.

    Returns:
        Name of a gain or of a ``weight_scale``, and an empty text; or an empty name and the
        reason.
    """
    layer, _, inside = module.rpartition(".self_attn.")
    part = "self_attn"
    if not layer:
        layer, _, inside = module.rpartition(".mlp.")
        part = "mlp"
    norm = f"{layer}.{_AFTER_NORM.get(f'{part}.{inside}')}.weight"
    config = settings(description)
    has_own_norm = config.norm_placement == "pre" and config.parallel_residual == "off"
    if norm in names and has_own_norm:
        return norm, ""
    is_plain_gate = is_gated(config) and not (
        config.activation_func_clamp_value or config.glu_linear_offset
    )
    if part == "mlp" and inside.endswith("down_proj") and is_plain_gate:  # experts' too
        target = f"{module.removesuffix('down_proj')}up_proj.{WEIGHT_SCALE}"
    elif inside == "o_proj" and not kv_cache:
        target = f"{layer}.self_attn.v_proj.{WEIGHT_SCALE}"
    else:
        return "", "no layer before it can take it"
    return (target, "") if target in names else ("", "the layer before is not quantized")


def _factor(
    module: str, target: str, scale: Tensor, description: Mapping[str, Any]
) -> Float[Tensor, " F"]:
    """Return what multiplies the rows of a target, of the scale of a module's inputs."""
    if not target.endswith(f"v_proj.{WEIGHT_SCALE}"):
        return scale
    config = settings(description)
    heads = scale.view(num_kv_heads(config), -1, head_dim(config))
    if not torch.equal(heads, heads[:, :1].expand_as(heads)):
        raise _refusal(module, "query heads of one value head differ")
    return heads[:, 0].reshape(-1)


def _refusal(name: str, why: str) -> ValueError:
    return ValueError(
        f"{name} multiplies inputs, which --format compressed-tensors has no place for, and "
        f"cannot go into the layer before: {why}. Use --format hf-quant, or quantize by "
        "another --method."
    )
