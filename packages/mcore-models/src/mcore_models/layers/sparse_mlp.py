"""A gated feed-forward layer that sets the smallest gates of each token to 0.

No sort is needed: the gates of a token are taken as samples of a normal distribution, and the
threshold is its quantile, from their mean and standard deviation.

Reference:
    Gemma team 2025, Gemma 3n model card; the statistical top-k: You et al. 2025, Spark
    Transformer, arXiv:2506.06644, section 3.2.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_models.layers.mlp import MLP
from mcore_parallel.collectives import copy_to, reduce_from
from mcore_parallel.mesh import SINGLE, Axis


class SparseMLP(MLP):
    """Gated MLP that sets a share of each token's gates to 0 before the activation."""

    def __init__(
        self, *sizes: Any, sparsity: float, axis: Axis = SINGLE, **options: Any
    ) -> None:
        """Allocate the layer as ``MLP``; ``sparsity``: share of gates that are set to 0."""
        super().__init__(*sizes, axis=axis, **options)
        self.axis, self.quantile = axis, normal_quantile(sparsity)

    def _activate(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, -1)
        return super()._activate(torch.cat([cut_gates(gate, self.quantile, self.axis), up], -1))


def normal_quantile(share: float) -> float:
    """Return the quantile of N(0, 1) at ``share``, rounded to float32 as in Gemma 3n's release.

    Args:
        share: above 0 and below 1.
    """
    return torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(share)).item()


def cut_gates(
    gate: Float[Tensor, "*B f"], quantile: float, axis: Axis = SINGLE
) -> Float[Tensor, "*B f"]:
    """Return ``relu(gate - (mean + quantile * deviation))`` for the gates of each token.

    All-reduces mean and standard deviation over ``axis``, and their gradients in backward.

    Args:
        gate: this rank's share of each token's gates.
        quantile: threshold in standard deviations, of ``normal_quantile``.
        axis: ranks that split the gates evenly.
    """
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    count = gate.shape[-1] * axis.size

    def mean(x: Tensor) -> Tensor:
        # reduce_from sums in forward. Every rank's gates depend on that sum, so copy_to sums
        # the gradient in backward.
        return reduce_from(copy_to(x.sum(-1, keepdim=True), axis), axis) / count

    center = mean(wide)
    deviation = mean((wide - center).square()).sqrt()
    return torch.relu(wide - (center + quantile * deviation)).to(gate.dtype)
