"""GPTQ: columns are rounded one after the other, and the rest makes up for each one's error.

After a column is rounded, the columns that are not rounded yet move to where the output's
squared error is least. In the order of the columns, so that groups stay where they are and
nothing but the rounded numbers changes in the file. A channel that no input used is rounded to
the nearest.

Reference:
    Frantar et al. 2022, GPTQ. arXiv:2210.17323, algorithm 1.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_ckpt.formats.quantized_layouts import QuantLayout, Scales
from mcore_infer.quantization.matrices import FusedMatrix
from mcore_infer.quantization.observing import InputStatistics
from mcore_infer.quantization.rounding import RoundedMatrix

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
