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
