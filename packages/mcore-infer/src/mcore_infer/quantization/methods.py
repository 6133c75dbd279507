"""A fused matrix before and after: what every method of quantization takes and gives.

Holds rounding to nearest, SmoothQuant (the same after a change of scale between weights and
inputs), and the statistics of inputs that a method needs.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_ckpt.formats.quantized_layouts import QuantLayout, Scales
from mcore_ckpt.mapping.low_bits import LARGEST
from mcore_infer.quantization.matrices import FusedMatrix
from mcore_infer.quantization.observing import InputStatistics
from mcore_models.layers.norm import LayerNorm, RMSNorm

_SMOOTHING = 0.5
_SMALLEST = 1e-5


@dataclass(frozen=True)
class RoundedMatrix:
    """A fused matrix in codes."""

    packed: tuple[Shaped[Tensor, "_ _"], ...]
    """Of each member, as the file holds it."""
    scales: tuple[Scales, ...]
    """Of each member."""
    wide: Float[Tensor, "F D"]
    """What it stands for: codes times scales, float32, ``pre_quant_scale`` left out."""
    pre_quant_scale: Float[Tensor, " D"] | None = None
    """What inputs are multiplied by first; None: nothing."""
    input_amax: Float[Tensor, ""] | None = None
    """Largest magnitude of what goes into the GEMM; None: that of the inputs seen."""
    folded: Float[Tensor, " D"] | None = None
    """What the norm before was divided by, and the weight multiplied; None: nothing."""


def round_to_nearest(
    matrix: FusedMatrix, layout: QuantLayout, weight: Float[Tensor, "F D"] | None = None
) -> RoundedMatrix:
    """Round a fused matrix, whose members share the scale of the whole tensor.

    Args:
        matrix: says where members begin.
        layout: what it becomes.
        weight: to round instead of the matrix' own.
    """
    weight = (matrix.weight if weight is None else weight).float()
    amax = weight.abs().amax()
    packed, scales, wide = [], [], []
    for _, begin, end in matrix.members:
        own = weight[begin:end]
        chosen = layout.scales(own, amax)
        packed.append(layout.packed(layout.quantized(own, chosen)))
        scales.append(chosen)
        wide.append(layout.dequantized(packed[-1], chosen))
    return RoundedMatrix(tuple(packed), tuple(scales), torch.cat(wide))


def smooth_and_round(
    matrix: FusedMatrix, layout: QuantLayout, seen: InputStatistics
) -> RoundedMatrix:
    """Move half of the inputs' range into the weight, then round both.

    Reference:
        Xiao et al. 2022, SmoothQuant, eq. 4 with alpha 0.5. arXiv:2211.10438.
    """
    weight = matrix.weight.float()
    tops = matrix.shared(weight.abs().amax(0)).clamp(min=_SMALLEST)
    reached = matrix.shared(seen.amax)
    strength = reached.clamp(min=_SMALLEST) ** _SMOOTHING / tops ** (1 - _SMOOTHING)
    strength = torch.where(reached > 0, strength, torch.ones_like(strength))
    found = round_to_nearest(matrix, layout, weight * strength)
    top = (seen.amax / strength).amax() if seen.num_rows else None
    return RoundedMatrix(found.packed, found.scales, found.wide, 1 / strength, top)


def input_scale(layout: QuantLayout, amax: Tensor) -> Float[Tensor, ""]:
    """Return what multiplies codes of inputs whose largest magnitude is ``amax``."""
    assert layout.inputs
    limit = LARGEST[layout.inputs]
    # The second of two scales: what its first, in e4m3, multiplies.
    limit = limit * LARGEST["e4m3"] if layout.inputs == "e2m1" else limit
    return (amax.float() / limit).clamp(min=2.0**-100)


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


_DAMPING = 0.01


def compensate_and_round(
    matrix: FusedMatrix, layout: QuantLayout, seen: InputStatistics
) -> RoundedMatrix:
    """Round a fused matrix column by column; rows do not depend on each other."""
    codes, scales = rounded_columns(matrix.weight, layout, seen.hessian)
    packed, chosen, wide = [], [], []
    for _, begin, end in matrix.members:
        own = Scales(scales[begin:end].contiguous())
        packed.append(layout.packed(codes[begin:end]))
        chosen.append(own)
        wide.append(layout.dequantized(packed[-1], own))
    return RoundedMatrix(tuple(packed), tuple(chosen), torch.cat(wide))


def rounded_columns(
    weight: Float[Tensor, "F D"],
    layout: QuantLayout,
    hessian: Float[Tensor, "D D"],
    damping: float = _DAMPING,
) -> tuple[Tensor, Float[Tensor, "F d"]]:
    """Return codes ``[F, D]`` and the scale of each group of columns.

    Args:
        weight: of a layout with one scale a row and group.
        layout: what it becomes.
        hessian: mean product of pairs of inputs.
        damping: share of its mean diagonal that is added to the diagonal.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    weight, hessian = weight.to(wide).clone(), hessian.to(wide).clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal += damping * diagonal.mean()
    diagonal[dead] = 1.0
    # Row i of this factor says how the columns after i make up for column i.
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor = torch.linalg.cholesky(inverse, upper=True)
    group = layout.group[1]
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = []
    for first in range(0, weight.shape[1], group):
        # By what is left to round, which has made up for the groups before.
        scale = layout.scales(weight[:, first : first + group]).weight_scale.view(-1)
        scales.append(scale)
        for column in range(first, first + group):
            rounded = (weight[:, column] / scale).round().clamp(-8, 7)
            codes[:, column] = rounded.to(torch.int8)
            error = (weight[:, column] - rounded * scale) / factor[column, column]
            weight[:, column + 1 :] -= error[:, None] * factor[column, column + 1 :]
    return codes, torch.stack(scales, 1)
