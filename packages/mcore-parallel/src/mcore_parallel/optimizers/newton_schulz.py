"""Newton-Schulz iterations that bring the singular values of a matrix near 1.

A step is X <- a X + (b A + c A A) X with A = X X^T: an odd polynomial a s + b s^3 + c s^5 of
each singular value s, while singular vectors stay. Matrix products alone, which bfloat16 is
accurate enough for.

References:
    Jordan et al. 2024, Muon, https://kellerjordan.github.io/posts/muon/ (``simple``); Cesista
    2025, Squeezing 1-2 % efficiency gains out of Muon,
    https://leloykun.github.io/ponder/muon-opt-coeffs/ (``quintic``); Amsel et al. 2025, The
    Polar Express, arXiv:2505.16932, algorithm 1 (``polar_express``).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

CoefficientType = Literal["simple", "quintic", "polar_express"]
Coefficients = tuple[float, float, float]

_SAFETY = 1.01
"""Division of the polynomials' argument, so that rounding never brings a singular value above
the interval that they were fitted on (Amsel et al., section 4.3)."""


def _safe(a: float, b: float, c: float) -> Coefficients:
    return a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5


COEFFICIENTS: Mapping[CoefficientType, Sequence[Coefficients]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        _safe(8.28721201814563, -23.595886519098837, 17.300387312530933),
        _safe(4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        _safe(3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        _safe(3.3184196573706015, -2.488488024314874, 0.51004894012372),
        _safe(2.300652019954817, -1.6689039845749518, 0.4188073119525673),
        _safe(1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        _safe(1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
}
"""Of the first steps, a triple (a, b, c) each; the last repeats."""


def orthogonalize(
    x: Float[Tensor, "b m n"], num_steps: int, coefficient_type: CoefficientType
) -> Float[Tensor, "b m n"]:
    """Return matrices of the same singular vectors with singular values near 1.

    Args:
        x: matrices of one shape; overwritten. Computed in its dtype, bfloat16 for speed.
        num_steps: of the iteration.
        coefficient_type: of its polynomials.

    Reference:
        Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:  # the Gram matrix of the short side is the small one
        x = x.mT
    # The Frobenius norm bounds the largest singular value, which must not exceed 1.
    x.div_(torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7))
    table = COEFFICIENTS[coefficient_type]
    if len(x) == 1:  # a plain product: its bits are the same whatever else a rank computes
        x = _iterate(x[0], num_steps, table, torch.addmm)[None]
    else:
        x = _iterate(x, num_steps, table, torch.baddbmm)
    return x.mT if is_tall else x


def _iterate(
    x: Tensor, num_steps: int, table: Sequence[Coefficients], addmm: Callable[..., Tensor]
) -> Tensor:
    for step in range(num_steps):
        a, b, c = table[min(step, len(table) - 1)]
        gram = x @ x.mT
        gram = addmm(gram, gram, gram, beta=b, alpha=c)  # b A + c A A
        x = addmm(x, gram, x, beta=a)
    return x
