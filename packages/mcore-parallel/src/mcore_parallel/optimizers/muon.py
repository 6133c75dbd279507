"""Muon: orthogonalized momentum, optionally with AdaMuon's or NorMuon's second moment.

With M the mean of gradients and O = orthogonalize(M), the update is -lr O times a factor that
depends on the shape. Nesterov's form orthogonalizes (1 - beta) G + beta M. O has the singular
vectors of the momentum and singular values near 1, so all directions of a matrix learn equally
fast.

AdaMuon takes O = orthogonalize(sign(M)) and divides each element of O by the root of the
element's mean square over the steps. NorMuon divides each row of O by the root of the row's
mean square. Both scale the result to a root mean square of 0.2, as is usual for Adam.

``orthogonalize`` iterates X <- a X + (b A + c A A) X with A = X X^T, which maps each singular
value s to the odd polynomial a s + b s^3 + c s^5 and keeps the singular vectors. The iteration
consists of matrix products only, for which bfloat16 is accurate enough.

References:
    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, Muon is
    scalable, arXiv:2502.16982 (decay, scale of 0.2 sqrt(max(m, n))); Si et al. 2025, AdaMuon,
    arXiv:2507.11005; Li et al. 2025, NorMuon, arXiv:2510.05491. Polynomials: Jordan et al.
    (``simple``); Cesista 2025, Squeezing 1-2 % efficiency gains out of Muon,
    https://leloykun.github.io/ponder/muon-opt-coeffs/ (``quintic``); Amsel et al. 2025, The
    Polar Express, arXiv:2505.16932, algorithm 1 (``polar_express``).
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.kernels.symmetric_gemm import symmetric_product
from mcore_parallel.optimizers.config import MuonConfig
from mcore_parallel.optimizers.update_rule import MomentDtype, Shape

_UPDATE_RMS = 0.2
"""Root mean square of an update of AdaMuon and NorMuon, before ``muon_extra_scale_factor``."""

CoefficientType = Literal["simple", "quintic", "polar_express"]
Coefficients = tuple[float, float, float]

_SAFETY = 1.01
"""Divisor of the polynomials' argument, so that rounding never moves a singular value above
the interval on which they were fitted (Amsel et al., section 4.3)."""


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
"""Polynomials (a, b, c) of the first steps; the last one is repeated."""


class Muon:
    """Matrix rule of Muon; the elementwise state is the momentum."""

    moments: Mapping[str, MomentDtype] = MappingProxyType({"momentum": "fp32"})

    def __init__(self, config: MuonConfig) -> None:
        self.config = config

    def state_shapes(self, shape: Shape) -> Mapping[str, Shape]:
        """Return the shapes of a matrix's state, see the config."""
        return self.config.state_shapes(shape)

    def wire_dtype(self, main: torch.dtype) -> torch.dtype:
        """Return bfloat16, or float64 for float64 main weights (exact comparisons)."""
        return torch.float64 if main == torch.float64 else torch.bfloat16

    def cost(self, shape: Shape) -> float:
        """Return max(m, n) min(m, n)^2, proportional to the work of the iteration."""
        return float(max(shape)) * min(shape) ** 2

    def message(
        self,
        grad: Float[Tensor, " n"],
        moments: Mapping[str, Float[Tensor, " n"]],
        *,
        grad_scale: Float[Tensor, ""] | float,
    ) -> Float[Tensor, " n"]:
        """Update the momentum; return it or Nesterov's lookahead, for AdaMuon its sign."""
        momentum, beta = moments["momentum"], self.config.muon_momentum
        grad = grad.to(momentum.dtype) * grad_scale
        momentum.lerp_(grad, 1 - beta)
        ahead = grad.lerp_(momentum, beta) if self.config.muon_nesterov else momentum
        return ahead.sign() if self.config.muon_moment2_method == "adamuon" else ahead

    def direction(
        self,
        messages: Float[Tensor, "b m n"],
        state: Mapping[str, Float[Tensor, "b ..."]],
        *,
        num_steps: int,  # noqa: ARG002 - the rule is the same in every step
    ) -> Float[Tensor, "b m n"]:
        """Return the orthogonalized messages, divided by the root of a second moment if any."""
        config = self.config
        steps, kind = config.muon_num_ns_steps, config.muon_coefficient_type
        update = orthogonalize(messages, steps, kind)
        if config.muon_moment2_method == "none":
            return update
        square = state["square"]
        update = update.to(square.dtype)
        new_square = update.square()
        if config.muon_moment2_method == "normuon":
            new_square = new_square.mean(-1)  # [b, m, n] -> [b, m]
        square.lerp_(new_square, 1 - config.muon_beta2)
        root = square.sqrt() + config.muon_eps
        update /= root if root.dim() == update.dim() else root[..., None]
        # The root mean square of all elements becomes _UPDATE_RMS.
        rms = torch.linalg.matrix_norm(update, keepdim=True) / update[0].numel() ** 0.5
        return update * (_UPDATE_RMS / rms.clamp(min=1e-30))

    def factor(self, shape: Shape) -> float:
        """Return the factor of --muon-scale-mode for an (m, n) matrix; rows are outputs."""
        config, (rows, columns) = self.config, shape
        if config.muon_moment2_method != "none":
            return config.muon_extra_scale_factor
        by_shape = {
            "spectral": max(rows, columns),
            "unit_rms_norm": rows / columns,
            "shape_scaling": max(1.0, rows / columns),
        }[config.muon_scale_mode]
        return config.muon_extra_scale_factor * by_shape**0.5


def orthogonalize(
    x: Float[Tensor, "b m n"], num_steps: int, coefficient_type: CoefficientType
) -> Float[Tensor, "b m n"]:
    """Return matrices with the same singular vectors and singular values near 1.

    Args:
        x: matrices of one shape; overwritten. Computed in its dtype, bfloat16 for speed.
        num_steps: steps of the iteration.
        coefficient_type: key of the polynomials in ``COEFFICIENTS``.

    Reference:
        Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:  # the Gram matrix of the short side is the small one
        x = x.mT
    # The Frobenius norm bounds the largest singular value, which must not exceed 1.
    x.div_(torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7))
    table = COEFFICIENTS[coefficient_type]
    if len(x) == 1:  # not batched, so the bits do not depend on other matrices of the rank
        x = _iterate(x[0], num_steps, table, torch.addmm)[None]
    else:
        x = _iterate(x, num_steps, table, torch.baddbmm)
    return x.mT if is_tall else x


def _iterate(
    x: Tensor, num_steps: int, table: Sequence[Coefficients], addmm: Callable[..., Tensor]
) -> Tensor:
    for step in range(num_steps):
        a, b, c = table[min(step, len(table) - 1)]
        gram = symmetric_product(x)
        # b A + c A A, where A A = A A^T as A is symmetric.
        gram = symmetric_product(gram, gram, beta=b, alpha=c)
        x = addmm(x, gram, x, beta=a)
    return x
