"""Normalisation of the channels of each token.

A norm's weight is whole on every tensor rank. Its gradient is whole too when all ranks see
the same tokens and channels; when they see different tokens (sequence parallelism) or
different heads (norms of queries and keys) it is a part of a sum, and the layout says so.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.config import TransformerConfig
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.sharding import Layout, whole


class RMSNorm(nn.Module):
    """Divide by the root mean square, times a learned weight.

    Statistics are float32 or wider; the result has the input's dtype.

    Reference:
        Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(
        self,
        size: int,
        *,
        epsilon: float = 1e-5,
        zero_centered: bool = False,
        replicas: Axis = SINGLE,
        partial: Axis = SINGLE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the weight, which begins as the identity.

        Args:
            size: channels of the last dimension.
            epsilon: added to the mean square.
            zero_centered: keep the weight minus 1.
            replicas: ranks that hold the weight.
            partial: ranks whose gradients of it are parts of a sum.
            device: of the weight.
            dtype: of the weight.
        """
        super().__init__()
        self.epsilon, self.zero_centered = epsilon, zero_centered
        self.replicas, self.partial = replicas, partial
        self.weight = _identity(size, zero_centered, device, dtype)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Norm the last dimension."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        return F.rms_norm(x, weight.shape, weight, self.epsilon)

    def layouts(self) -> dict[str, Layout]:
        """Describe the weight, see ``mcore_parallel.sharding``."""
        return _layouts(self)


class LayerNorm(nn.Module):
    """Subtract the mean, divide by the standard deviation, times a weight, plus a bias.

    Statistics are float32 or wider; the result has the input's dtype.

    Reference:
        Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(
        self,
        size: int,
        *,
        epsilon: float = 1e-5,
        zero_centered: bool = False,
        replicas: Axis = SINGLE,
        partial: Axis = SINGLE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate weight and bias, which begin as the identity; see ``RMSNorm``."""
        super().__init__()
        self.epsilon, self.zero_centered = epsilon, zero_centered
        self.replicas, self.partial = replicas, partial
        self.weight = _identity(size, zero_centered, device, dtype)
        self.bias = nn.Parameter(torch.zeros(size, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Norm the last dimension."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        return F.layer_norm(x, weight.shape, weight, self.bias, self.epsilon)

    def layouts(self) -> dict[str, Layout]:
        """Describe weight and bias, see ``mcore_parallel.sharding``."""
        return _layouts(self)


def build_norm(
    config: TransformerConfig,
    size: int,
    *,
    replicas: Axis = SINGLE,
    partial: Axis = SINGLE,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Make the norm that ``config.normalization`` names, over ``size`` channels."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(
        size,
        epsilon=config.norm_epsilon,
        zero_centered=config.apply_layernorm_1p,
        replicas=replicas,
        partial=partial,
        device=device,
        dtype=dtype,
    )


def _identity(
    size: int,
    zero_centered: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Parameter:
    value = 0.0 if zero_centered else 1.0
    return nn.Parameter(torch.full((size,), value, device=device, dtype=dtype))


def _layouts(norm: RMSNorm | LayerNorm) -> dict[str, Layout]:
    return {
        name: whole("", tuple(parameter.shape), norm.replicas, norm.partial)
        for name, parameter in norm.named_parameters(recurse=False)
    }
