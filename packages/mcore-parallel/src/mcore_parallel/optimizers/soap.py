"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners.

L and R are the means of G G^T and G^T G for an (m, n) gradient G, Q_L and Q_R their
eigenvectors, M is the mean of gradients. V is Adam's second moment of the rotated gradient
Q_L^T G Q_R, and the update, rotated back, is Q_L (Q_L^T M Q_R / (sqrt(V) + eps)) Q_R^T. Every
few steps one step of a power iteration and a QR decomposition update the bases to L and R.

There are three differences from the authors' code. The first step updates weights, with the
bases of the first gradient. The rank that computes a matrix keeps all its state. L and R get a
small ramp on the diagonal before the decomposition: without the ramp rounding would decide the
eigenvectors of equal eigenvalues, such as the zeros of a first gradient, and results would
depend on the layout.

Vyas et al. 2024, SOAP, arXiv:2409.11321, algorithms 3 and 4.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.optimizers.config import SoapConfig
from mcore_parallel.optimizers.update_rule import MomentDtype, Shape

_RAMP = 5e-2
"""End of the ramp, as a fraction of the mean eigenvalue."""


class Soap:
    """Matrix rule of SOAP, without elementwise state."""

    moments: Mapping[str, MomentDtype] = MappingProxyType({})

    def __init__(self, config: SoapConfig) -> None:
        self.config = config

    def state_shapes(self, shape: Shape) -> Mapping[str, Shape]:
        """Return the shapes of a matrix's state, see the config."""
        return self.config.state_shapes(shape)

    def wire_dtype(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype of main weights: eigenvectors depend on small differences."""
        return main

    def cost(self, shape: Shape) -> float:
        """Return the work of products with the bases and of the QR decompositions per step."""
        rows, columns = (size if size <= self.config.soap_max_dim else 0 for size in shape)
        products = shape[0] * shape[1] * (rows + columns) * 4.0
        return products + 4.0 * (rows**3 + columns**3) / self.config.soap_precondition_frequency

    def message(
        self,
        grad: Float[Tensor, " n"],
        moments: Mapping[str, Float[Tensor, " n"]],  # noqa: ARG002 - there are none
        *,
        grad_scale: Float[Tensor, ""] | float,
    ) -> Float[Tensor, " n"]:
        """Return the scaled gradient."""
        wide = torch.promote_types(grad.dtype, torch.float32)
        return grad.to(wide) * grad_scale

    def direction(
        self,
        messages: Float[Tensor, "b m n"],
        state: Mapping[str, Float[Tensor, "b ..."]],
        *,
        num_steps: int,
    ) -> Float[Tensor, "b m n"]:
        """Return Adam's steps, computed in the eigenbasis of each matrix."""
        for index, gradient in enumerate(messages):
            matrix_state = {name: each[index] for name, each in state.items()}
            gradient.copy_(self._step(gradient, matrix_state, num_steps))
        return messages

    def factor(self, shape: Shape) -> float:  # noqa: ARG002 - Adam's step has no scale
        """Return 1."""
        return 1.0

    def _step(self, G: Tensor, state: Mapping[str, Tensor], num_steps: int) -> Tensor:
        config = self.config
        # L and R include the gradient before it is rotated. The first step computes the bases
        # from the first gradient; later steps refresh them after the update.
        for side, product in (("left", G @ G.mT), ("right", G.mT @ G)):
            if side in state:
                state[side].lerp_(product, 1 - config.soap_shampoo_beta)
                if num_steps == 1:
                    basis = torch.linalg.eigh(_with_ramp(state[side])).eigenvectors
                    state[f"{side}_basis"].copy_(basis.flip(-1))  # largest first
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(G, 1 - config.soap_beta1)
        rotated = _rotate(G, state)
        square.mul_(config.soap_beta2).addcmul_(rotated, rotated, value=1 - config.soap_beta2)
        corrections = 1 - config.soap_beta1**num_steps, 1 - config.soap_beta2**num_steps
        root = (square / corrections[1]).sqrt_().add_(config.soap_eps)
        step = _rotate(mean / corrections[0], state).div_(root)
        if (left := state.get("left_basis")) is not None:
            step = left @ step
        if (right := state.get("right_basis")) is not None:
            step = step @ right.mT
        if num_steps % config.soap_precondition_frequency == 0:
            self._refresh(state)
        return step

    def _refresh(self, state: Mapping[str, Tensor]) -> None:
        """Update the bases to L and R; permute the second moment like the bases' columns."""
        square = state["exp_avg_sq"]
        for dim, side in enumerate(("left", "right")):
            if side not in state:
                continue
            basis = state[f"{side}_basis"]
            product = _with_ramp(state[side]) @ basis
            # Sort columns by their Rayleigh quotients: QR orthogonalizes later columns against
            # earlier ones, so the columns of the largest eigenvalues are changed least.
            order = (basis * product).sum(0).argsort(descending=True)
            square.copy_(square.index_select(dim, order))
            basis.copy_(torch.linalg.qr(product[:, order]).Q)


def _with_ramp(x: Tensor) -> Tensor:
    """Return x plus a diagonal that grows from 0 to ``_RAMP`` times the mean eigenvalue."""
    ramp = torch.linspace(0, _RAMP, len(x), dtype=x.dtype, device=x.device)
    return x + torch.diag(ramp * x.diagonal().mean())


def _rotate(x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return Q_L^T x Q_R; a side without a basis is not rotated."""
    if (left := state.get("left_basis")) is not None:
        x = left.mT @ x
    if (right := state.get("right_basis")) is not None:
        x = x @ right
    return x
