"""Muon: momentum, orthogonalized; with AdaMuon's and NorMuon's second moments.

With M the mean of gradients and O = orthogonalize(M), weights move against O times a factor of
the shape. Nesterov's form orthogonalizes (1 - beta) G + beta M. O has the singular vectors of
the momentum and singular values near 1, so all directions of a matrix learn equally fast.

AdaMuon divides O elementwise by the root of its mean square, of O = orthogonalize(sign(M)).
NorMuon divides each row of O by the root of the row's mean square. Both scale the result to a
root mean square of 0.2, the usual one of an update of Adam.

References:
    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, Muon is
    scalable, arXiv:2502.16982 (decay, scale of 0.2 sqrt(max(m, n))); Si et al. 2025, AdaMuon,
    arXiv:2507.11005; Li et al. 2025, NorMuon, arXiv:2510.05491.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.optimizers.config import MuonConfig
from mcore_parallel.optimizers.newton_schulz import orthogonalize
from mcore_parallel.optimizers.update_rule import MomentDtype, Shape

_UPDATE_RMS = 0.2
"""Root mean square of an update of AdaMuon and NorMuon, before ``muon_extra_scale_factor``."""


class Muon:
    """The rule of matrices; state of a weight is its momentum."""

    moments: Mapping[str, MomentDtype] = MappingProxyType({"momentum": "fp32"})

    def __init__(self, config: MuonConfig) -> None:
        self.config = config

    def state_shapes(self, shape: Shape) -> Mapping[str, Shape]:
        """Name what is kept of a whole matrix: see the config."""
        return self.config.state_shapes(shape)

    def wire_dtype(self, main: torch.dtype) -> torch.dtype:
        """Iterate and communicate in bfloat16, or in the float64 of an exact run."""
        return torch.float64 if main == torch.float64 else torch.bfloat16

    def cost(self, shape: Shape) -> float:
        """Products of the iteration: proportional to max(m, n) min(m, n)^2."""
        return float(max(shape)) * min(shape) ** 2

    def message(
        self,
        grad: Float[Tensor, " n"],
        moments: Mapping[str, Float[Tensor, " n"]],
        *,
        grad_scale: Float[Tensor, ""] | float,
    ) -> Float[Tensor, " n"]:
        """Update the momentum; return it, or Nesterov's look ahead."""
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
        """Orthogonalize, and divide by the second moment if there is one."""
        config = self.config
        steps, kind = config.muon_num_ns_steps, config.muon_coefficient_type
        found = orthogonalize(messages, steps, kind)
        if config.muon_moment2_method == "none":
            return found
        square = state["square"]
        found = found.to(square.dtype)
        now = found.square()
        if config.muon_moment2_method == "normuon":
            now = now.mean(-1)  # [b, m, n] -> [b, m]
        square.lerp_(now, 1 - config.muon_beta2)
        root = square.sqrt() + config.muon_eps
        found /= root if root.dim() == found.dim() else root[..., None]
        # The root mean square of all elements becomes _UPDATE_RMS.
        rms = torch.linalg.matrix_norm(found, keepdim=True) / found[0].numel() ** 0.5
        return found * (_UPDATE_RMS / rms.clamp(min=1e-30))

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
