"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners.

With L and R the means of G G^T and G^T G of an (m, n) gradient G, and Q_L and Q_R their
eigenvectors, Adam's second moment V is kept of Q_L^T G Q_R, and the update
Q_L (Q_L^T M Q_R / (sqrt(V) + eps)) Q_R^T is rotated back, M the mean of gradients. Every few
steps the bases follow L and R by one step of a power iteration and a QR decomposition.

Three differences from the authors' code. The first step updates weights, by the bases of its
own gradient. All state is kept with the matrix on the rank that computes it. And L and R get a
small ramp on the diagonal before they are decomposed: without it rounding alone decides the
eigenvectors of equal eigenvalues, such as the zeros of a first gradient, and layouts would
train apart.

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
"""Of the mean eigenvalue, at the end of the ramp."""


class Soap:
    """The rule of matrices; no state is kept by element."""

    moments: Mapping[str, MomentDtype] = MappingProxyType({})

    def __init__(self, config: SoapConfig) -> None:
        self.config = config

    def state_shapes(self, shape: Shape) -> Mapping[str, Shape]:
        """Name what is kept of a whole matrix: see the config."""
        return self.config.state_shapes(shape)

    def wire_dtype(self, main: torch.dtype) -> torch.dtype:
        """Keep all bits of the gradient: eigenvectors depend on small differences."""
        return main

    def cost(self, shape: Shape) -> float:
        """Products with both bases, and their share of QR decompositions."""
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
        """Make Adam's step in the eigenbasis of each matrix."""
        for index, gradient in enumerate(messages):
            own = {name: each[index] for name, each in state.items()}
            gradient.copy_(self._step(gradient, own, num_steps))
        return messages

    def factor(self, shape: Shape) -> float:  # noqa: ARG002 - Adam's step has no scale
        """Return 1."""
        return 1.0

    def _step(self, G: Tensor, state: Mapping[str, Tensor], num_steps: int) -> Tensor:
        config = self.config
        # L and R take the gradient in before it is rotated. The first bases are those of the
        # first gradient alone; later ones are refreshed after the step.
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
        """Bring the bases up to date; the second moment follows their order of columns."""
        square = state["exp_avg_sq"]
        for dim, side in enumerate(("left", "right")):
            if side not in state:
                continue
            basis = state[f"{side}_basis"]
            product = _with_ramp(state[side]) @ basis
            # Columns in the order of their Rayleigh quotients, so that QR, which treats the
            # first ones first, keeps the large eigenvalues exact.
            order = (basis * product).sum(0).argsort(descending=True)
            square.copy_(square.index_select(dim, order))
            basis.copy_(torch.linalg.qr(product[:, order]).Q)


def _with_ramp(x: Tensor) -> Tensor:
    """Return x plus a diagonal that grows to a part of the mean eigenvalue."""
    ramp = torch.linspace(0, _RAMP, len(x), dtype=x.dtype, device=x.device)
    return x + torch.diag(ramp * x.diagonal().mean())


def _rotate(x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return Q_L^T x Q_R; a side without a basis stays."""
    if (left := state.get("left_basis")) is not None:
        x = left.mT @ x
    if (right := state.get("right_basis")) is not None:
        x = x @ right
    return x
