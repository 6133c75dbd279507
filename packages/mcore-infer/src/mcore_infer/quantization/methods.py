"""Methods of quantization: each takes a fused matrix and returns its codes and scales.

The methods are rounding to nearest; SmoothQuant, which moves a part of the inputs' range into
the weight; AWQ, which scales important channels to a finer grid; and GPTQ, which compensates
the error of each column in the columns after it.
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
    """The result of a method: codes and scales of a fused matrix."""

    packed: tuple[Shaped[Tensor, "_ _"], ...]
    """Packed codes of each member, as stored in the file."""
    scales: tuple[Scales, ...]
    """Scales of each member."""
    wide: Float[Tensor, "F D"]
    """Decoded weight in float32, without ``pre_quant_scale``."""
    pre_quant_scale: Float[Tensor, " D"] | None = None
    """Factor on each input channel before the GEMM; None: no factor."""
    input_amax: Float[Tensor, ""] | None = None
    """Largest magnitude of the scaled inputs; None: the observed largest magnitude."""
    folded: Float[Tensor, " D"] | None = None
    """Factor moved from the previous norm into the weight; None: no factor."""


def round_to_nearest(
    matrix: FusedMatrix, layout: QuantLayout, weight: Float[Tensor, "F D"] | None = None
) -> RoundedMatrix:
    """Round a fused matrix to nearest; its members share the scale of the whole matrix.

    Args:
        matrix: fused matrix with its members.
        layout: format of the codes.
        weight: weight to round; None: the matrix's weight.
    """
    weight = (matrix.weight if weight is None else weight).float()
    amax = weight.abs().amax()
    packed, scales, wide = [], [], []
    for _, begin, end in matrix.members:
        rows = weight[begin:end]
        member_scales = layout.scales(rows, amax)
        packed.append(layout.packed(layout.quantized(rows, member_scales)))
        scales.append(member_scales)
        wide.append(layout.dequantized(packed[-1], member_scales))
    return RoundedMatrix(tuple(packed), tuple(scales), torch.cat(wide))


def smooth_and_round(
    matrix: FusedMatrix, layout: QuantLayout, seen: InputStatistics
) -> RoundedMatrix:
    """Quantize a matrix by SmoothQuant: move half of the inputs' range into the weight, round.

    Reference:
        Xiao et al. 2022, SmoothQuant, eq. 4 with alpha 0.5. arXiv:2211.10438.
    """
    weight = matrix.weight.float()
    weight_amax = matrix.shared(weight.abs().amax(0)).clamp(min=_SMALLEST)
    input_amax = matrix.shared(seen.amax)
    # s_j = max|x_j| ** alpha / max|w_j| ** (1 - alpha): inputs are divided by it, weights
    # multiplied. Channels without inputs keep a factor of 1.
    strength = input_amax.clamp(min=_SMALLEST) ** _SMOOTHING / weight_amax ** (1 - _SMOOTHING)
    strength = torch.where(input_amax > 0, strength, torch.ones_like(strength))
    rounded = round_to_nearest(matrix, layout, weight * strength)
    top = (seen.amax / strength).amax() if seen.num_rows else None
    return RoundedMatrix(rounded.packed, rounded.scales, rounded.wide, 1 / strength, top)


def input_scale(layout: QuantLayout, amax: Tensor) -> Float[Tensor, ""]:
    """Return the scale of input codes for inputs of largest magnitude ``amax``."""
    assert layout.inputs
    limit = LARGEST[layout.inputs]
    # e2m1 has two levels of scales. This is the second, a factor on the first scales in e4m3.
    limit = limit * LARGEST["e4m3"] if layout.inputs == "e2m1" else limit
    return (amax.float() / limit).clamp(min=2.0**-100)


_STEPS = 20


def search_strength(
    matrix: FusedMatrix, layout: QuantLayout, seen: InputStatistics
) -> Float[Tensor, " D"]:
    """Search the factors on the columns of a matrix that minimize the output error (AWQ).

    Multiplying a column by s and dividing its input by s changes only the rounding: a larger
    column gets more of its group's codes. s is a power of the channel's mean magnitude; the
    power with the least output error is chosen. Returns ones if no power reduces the error. The
    differences to the paper: the error is that of the matrix's output, computed exactly from
    second moments, and weights are not clipped.

    Reference:
        Lin et al. 2023, AWQ, section 3.2. arXiv:2306.00978.
    """
    weight = matrix.weight.float()
    magnitude = matrix.shared(seen.abs_sum / max(1, seen.num_rows)).clamp(min=1e-6)
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(_STEPS):
        strength = magnitude ** (step / _STEPS)
        # Center the factors on 1, in logarithms.
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
    """Quantize a matrix by AWQ: scale its columns, fold the inverse into the norm, round.

    Changes the previous norm in place if only this matrix reads its output; otherwise the
    result has a ``pre_quant_scale``.
    """
    strength = search_strength(matrix, layout, seen)
    rounded = round_to_nearest(matrix, layout, matrix.weight.float() * strength)
    packed, scales, wide = rounded.packed, rounded.scales, rounded.wide
    if matrix.norm is None:
        return RoundedMatrix(packed, scales, wide, 1 / strength)
    fold_(matrix.norm, strength)
    return RoundedMatrix(packed, scales, wide, folded=strength)


def fold_(norm: RMSNorm | LayerNorm, strength: Float[Tensor, " D"]) -> None:
    """Divide the output channels of a norm by ``strength``, in place."""
    with torch.no_grad():
        weight, bias = norm.weight, getattr(norm, "bias", None)
        assert weight is not None  # FusedMatrix.norm has a weight
        offset = 1.0 if norm.zero_centered else 0.0  # the gain is weight + offset
        weight.copy_((weight.double() + offset) / strength.double() - offset)
        if bias is not None:
            bias.copy_(bias.double() / strength.double())


_DAMPING = 0.01


def compensate_and_round(
    matrix: FusedMatrix, layout: QuantLayout, seen: InputStatistics
) -> RoundedMatrix:
    """Quantize a fused matrix by GPTQ, column by column; rows are independent."""
    codes, scales = rounded_columns(matrix.weight, layout, seen.hessian)
    packed, all_scales, wide = [], [], []
    for _, begin, end in matrix.members:
        member_scales = Scales(scales[begin:end].contiguous())
        packed.append(layout.packed(codes[begin:end]))
        all_scales.append(member_scales)
        wide.append(layout.dequantized(packed[-1], member_scales))
    return RoundedMatrix(tuple(packed), tuple(all_scales), torch.cat(wide))


def rounded_columns(
    weight: Float[Tensor, "F D"],
    layout: QuantLayout,
    hessian: Float[Tensor, "D D"],
    damping: float = _DAMPING,
) -> tuple[Tensor, Float[Tensor, "F d"]]:
    """Round columns in order, compensating each error in the columns after it (GPTQ).

    The order of columns is kept, so that groups stay contiguous in the file. Channels without
    observed inputs are rounded to nearest.

    Args:
        weight: weight to round.
        layout: format with one scale for each row and group of columns.
        hessian: mean product of all pairs of input channels.
        damping: fraction of the mean diagonal that is added to the diagonal.

    Returns:
        Codes ``[F, D]``, and the scale of each row and group of columns.

    Reference:
        Frantar et al. 2022, GPTQ, algorithm 1. arXiv:2210.17323.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    weight, hessian = weight.to(wide).clone(), hessian.to(wide).clone()
    diagonal = hessian.diagonal()
    has_no_input = diagonal == 0
    diagonal += damping * diagonal.mean()
    diagonal[has_no_input] = 1.0
    # Row i of the upper Cholesky factor of the inverse Hessian holds the compensation of column
    # i's error in the columns after i.
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor = torch.linalg.cholesky(inverse, upper=True)
    group = layout.group[1]
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = []
    for first in range(0, weight.shape[1], group):
        # The scale of a group depends on its weights after compensating earlier groups.
        scale = layout.scales(weight[:, first : first + group]).weight_scale.view(-1)
        scales.append(scale)
        for column in range(first, first + group):
            rounded = (weight[:, column] / scale).round().clamp(-8, 7)
            codes[:, column] = rounded.to(torch.int8)
            error = (weight[:, column] - rounded * scale) / factor[column, column]
            weight[:, column + 1 :] -= error[:, None] * factor[column, column + 1 :]
    return codes, torch.stack(scales, 1)
