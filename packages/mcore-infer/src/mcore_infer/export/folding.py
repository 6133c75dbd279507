"""Scales of inputs that a format has no place for, put into the layer before.

A quantized matrix may want its inputs multiplied by ``pre_quant_scale``. The layer before can
do so: a norm by its gain, ``up_proj`` and ``v_proj`` by the scales of their outputs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_ckpt.families.common.fields import settings
from mcore_ckpt.formats.quantization import WidenedRows
from mcore_ckpt.formats.quantized_layouts import PRE_QUANT_SCALE, WEIGHT_SCALE
from mcore_parallel.logical_tensors import head_dim, is_gated, num_kv_heads

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
        target, factor = _before(module, scale, widened, description)
        if target in found and not torch.equal(found[target], factor):
            raise _refusal(name, "what reads the same norm has another")
        found[target] = factor
        bias = f"{target.rpartition('.')[0]}.bias"
        if bias in widened.stored.entries:
            found[bias] = factor
    return found


def _before(
    module: str, scale: Tensor, widened: WidenedRows, description: Mapping[str, Any]
) -> tuple[str, Tensor]:
    layer, _, inside = module.rpartition(".self_attn.")
    part = "self_attn"
    if not layer:
        layer, _, inside = module.rpartition(".mlp.")
        part = "mlp"
    norm = _AFTER_NORM.get(f"{part}.{inside}")
    config = settings(description)
    if norm and f"{layer}.{norm}.weight" in widened.entries and config.norm_placement == "pre":
        return f"{layer}.{norm}.weight", scale
    if inside == "down_proj" and is_gated(config):
        target = f"{layer}.mlp.up_proj.{WEIGHT_SCALE}"
    elif inside == "o_proj" and not widened.plan.kv_cache:
        target = f"{layer}.self_attn.v_proj.{WEIGHT_SCALE}"
        heads = scale.view(num_kv_heads(config), -1, head_dim(config))
        if not torch.equal(heads, heads[:, :1].expand_as(heads)):
            raise _refusal(module, "query heads of one value head differ")
        scale = heads[:, 0].reshape(-1)
    else:
        raise _refusal(module, "no layer before it can take it")
    if target not in widened.stored.entries:
        raise _refusal(module, "the layer before is not quantized")
    return target, scale


def _refusal(name: str, why: str) -> ValueError:
    return ValueError(
        f"{name} multiplies inputs, which --format compressed-tensors has no place for, and "
        f"cannot go into the layer before: {why}. Use --format hf-quant, or quantize by "
        "another --method."
    )
