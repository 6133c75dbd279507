"""Activation-aware weight quantization: channels that matter are rounded on a finer grid.

Multiplying a column of the weight by s and dividing its input by s changes nothing but the
rounding: a larger column gets more of its group's codes. s is a power of the channel's mean
magnitude, and the power is searched for the least error of the output. The input's division
goes into the norm before it, where that norm feeds nothing else; else it stays with the matrix
as ``pre_quant_scale``.

Differs from the paper: the error is that of the matrix's own output, computed exactly from the
second moments of its inputs, and weights are not clipped.

Reference:
    Lin et al. 2023, AWQ. arXiv:2306.00978, section 3.2.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_ckpt.formats.quantized_layouts import QuantLayout
from mcore_infer.quantization.matrices import FusedMatrix
from mcore_infer.quantization.observing import InputStatistics
from mcore_infer.quantization.rounding import RoundedMatrix, round_to_nearest
from mcore_models.layers.norm import LayerNorm, RMSNorm

_STEPS = 20


def search_strength(
    matrix: FusedMatrix, layout: QuantLayout, seen: InputStatistics
) -> Float[Tensor, " D"]:
    """Return what multiplies the columns of a matrix; all ones where nothing is better."""
    weight = matrix.weight.float()
    magnitude = matrix.shared(seen.abs_sum / max(1, seen.num_rows)).clamp(min=1e-6)
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(_STEPS):
        strength = magnitude ** (step / _STEPS)
        strength = strength / (strength.amax() * strength.amin()).sqrt()
        strength = strength.clamp(min=1e-4)
        wide = round_to_nearest(matrix, layout, weight * strength).wide
        error = seen.output_error(weight, wide / strength - weight)
        if error < least:
            best, least = strength, error
    return best


def scale_and_round(
    matrix: FusedMatrix, layout: QuantLayout, seen: InputStatistics
) -> RoundedMatrix:
    """Find a matrix' strengths, fold their inverse into the norm before it, and round it.

    Changes the norm, where the matrix has one.
    """
    strength = search_strength(matrix, layout, seen)
    found = round_to_nearest(matrix, layout, matrix.weight.float() * strength)
    if matrix.norm is None:
        return RoundedMatrix(found.packed, found.scales, found.wide, 1 / strength)
    fold_(matrix.norm, strength)
    return RoundedMatrix(found.packed, found.scales, found.wide, folded=strength)


def fold_(norm: RMSNorm | LayerNorm, strength: Float[Tensor, " D"]) -> None:
    """Divide what a norm gives by ``strength``, in place."""
    with torch.no_grad():
        weight, bias = norm.weight, getattr(norm, "bias", None)
        offset = 1.0 if norm.zero_centered else 0.0
        weight.copy_((weight.double() + offset) / strength.double() - offset)
        if bias is not None:
            bias.copy_(bias.double() / strength.double())
