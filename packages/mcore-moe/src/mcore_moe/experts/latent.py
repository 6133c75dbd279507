"""A narrower space for routed experts: tokens are projected down to it and their sums up again.

Fewer bytes travel between ranks and every expert has smaller matrices, so that a model affords
more of them. The router and the shared expert see the tokens themselves. NVIDIA 2025, Nemotron
3: LatentMoE, arXiv:2512.20856.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_parallel.grad_slot import overwrites
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.rng import reset_weight_
from mcore_parallel.sharding import ParamLayout, whole
from mcore_parallel.tensor_parallel.linear_autograd import column_parallel


def latent_projections(
    hidden_size: int,
    latent_size: int,
    stds: tuple[float, float | None],
    *,
    tp: Axis = SINGLE,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> "tuple[LatentProjection, LatentProjection] | tuple[None, None]":
    """Make the projections into the narrower space and out of it; none for a width of 0.

    Args:
        hidden_size: width of the model.
        latent_size: width of the narrower space, or 0.
        stds: of the weights, in and out; None: the second as the first.
        tp: ranks that hold the weights and see different tokens.
        device: of the weights.
        dtype: of the weights.
    """
    if not latent_size:
        return None, None
    std, up_std = stds
    up_std = std if up_std is None else up_std
    placed = {"tp": tp, "device": device, "dtype": dtype}
    down = LatentProjection(hidden_size, latent_size, init_std=std, **placed)
    return down, LatentProjection(latent_size, hidden_size, init_std=up_std, **placed)


class LatentProjection(nn.Module):
    """A linear without bias that every tensor rank holds whole and gives its own tokens.

    Attributes:
        weight: ``[F, D]``; its gradients are partial sums over ``tp``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: Axis = SINGLE,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate and initialise the weight.

        Args:
            in_features: D.
            out_features: F.
            tp: ranks that hold the weight and see different tokens.
            init_std: 0.0 leaves zeros and draws nothing.
            device: of the weight.
            dtype: of the weight.
        """
        super().__init__()
        self.tp, self.init_std = tp, init_std
        weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
        self.weight = overwrites(nn.Parameter(weight))
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Fill the weight; None as seed draws one from torch's default CPU generator."""
        reset_weight_(self, std=self.init_std, seed=seed)

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        """Project tokens; no communication."""
        return column_parallel(x, self.weight, None, SINGLE, sequence_parallel=False)

    def layouts(self) -> dict[str, ParamLayout]:
        """Describe the weight: whole on every tensor rank, with partial gradients."""
        shape = tuple(self.weight.shape)
        return {"weight": whole("", shape, replicas=self.tp, partial=self.tp)}
