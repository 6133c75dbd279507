"""Projections of tokens into a narrower latent space for routed experts, and out of it.

Ranks exchange fewer bytes and every expert has smaller matrices, so a model can have more
experts. The router and the shared expert read the tokens in the model's width. NVIDIA 2025,
Nemotron 3: LatentMoE, arXiv:2512.20856.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_parallel.autograd.grad_slot import overwrites
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.rng import reset_weight_
from mcore_parallel.sharding import ParamLayout, whole_layout
from mcore_parallel.tensor_parallel.linear_autograd import column_parallel


def latent_projections(
    hidden_size: int,
    latent_size: int,
    stds: tuple[float, float],
    *,
    tp: Axis = SINGLE,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> "tuple[LatentProjection, LatentProjection] | tuple[None, None]":
    """Build the projections into the latent space and out of it; two None for a width of 0.

    Args:
        hidden_size: width of the model.
        latent_size: width of the latent space, or 0.
        stds: standard deviations of the initial weights, in and out.
        tp: ranks that hold the weights and have different tokens.
        device: of the weights.
        dtype: of the weights.
    """
    if not latent_size:
        return None, None
    std, up_std = stds
    factory_kwargs = {"tp": tp, "device": device, "dtype": dtype}
    down = LatentProjection(hidden_size, latent_size, init_std=std, **factory_kwargs)
    return down, LatentProjection(latent_size, hidden_size, init_std=up_std, **factory_kwargs)


class LatentProjection(nn.Module):
    """A linear without bias, replicated over tensor ranks, which project different tokens.

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
            tp: ranks that hold the weight and have different tokens.
            init_std: of the initial weight; 0.0 leaves zeros and draws no random numbers.
            device: of the weight.
            dtype: of the weight.
        """
        super().__init__()
        self.tp, self.init_std = tp, init_std
        weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
        self.weight = overwrites(nn.Parameter(weight))
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Fill the weight; seed None: drawn from torch's default CPU generator."""
        reset_weight_(self, std=self.init_std, seed=seed)

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        """Return ``x W^T``; no communication."""
        return column_parallel(x, self.weight, None, SINGLE, sequence_parallel=False)

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding: complete on every tensor rank, with partial gradients."""
        shape = tuple(self.weight.shape)
        return {"weight": whole_layout("", shape, replicas=self.tp, partial=self.tp)}
