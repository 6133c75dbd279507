"""Norms of the channels of each token.

A norm's weight is replicated over tensor ranks. Its gradient is complete on every rank if all
ranks compute the same tokens and channels. If the ranks compute different tokens (sequence
parallelism) or different heads (norms of queries and keys), a rank's gradient is a part of a
sum, which ``layouts`` declares.

Norms of the residual stream follow an addition: ``add_and_norm`` computes both, on a GPU in one
kernel (``kernels.norm``).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.config import TransformerConfig
from mcore_models.kernels import norm as kernels
from mcore_models.logical_tensors import head_dim
from mcore_parallel.collectives import copy_to, reduce_from
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.sharding import ParamLayout, sliced_layout, whole_layout

NormKernel = Callable[..., Tensor]
"""Returns the norm of x; arguments: x, weight, bias (None: RMSNorm), ``epsilon``, ``offset``
(added to the weight)."""


class _Norm(nn.Module):
    """Weight, kernel and preceding addition of RMSNorm and LayerNorm.

    Statistics are float32 or wider; the result has the input's dtype.
    """

    def __init__(
        self,
        size: int,
        *,
        epsilon: float = 1e-5,
        zero_centered: bool = False,
        weight: bool = True,
        replicas: Axis = SINGLE,
        partial: Axis = SINGLE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the weight, initialized to the identity.

        Args:
            size: channels of the last dimension.
            epsilon: added to the mean square.
            zero_centered: store the weight minus 1.
            weight: whether the norm has a weight.
            replicas: ranks that hold the weight.
            partial: ranks whose gradients of the weight are parts of a sum.
            device: of the weight.
            dtype: of the weight.
        """
        super().__init__()
        self.epsilon, self.zero_centered = epsilon, zero_centered
        self.replicas, self.partial = replicas, partial
        self.kernel: NormKernel | None = None
        self.weight = _identity(size, zero_centered, device, dtype) if weight else None

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Norm the last dimension."""
        kernel = kernels.norm if self.kernel is None else self.kernel
        return kernel(x, *self.parameters_of_kernel(x), **self._constants())

    def add_and_norm(
        self, x: Float[Tensor, "*B D"], branch: Float[Tensor, "*B D"]
    ) -> tuple[Float[Tensor, "*B D"], Float[Tensor, "*B D"]]:
        """Return the norm of ``x + branch``, and the sum; one kernel on a GPU."""
        if self.kernel is None:
            parameters = self.parameters_of_kernel(x)
            return kernels.add_and_norm(x, branch, *parameters, **self._constants())
        total = x + branch
        return self(total), total

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the parameters."""
        return {
            name: whole_layout("", tuple(parameter.shape), self.replicas, self.partial)
            for name, parameter in self.named_parameters(recurse=False)
        }

    def parameters_of_kernel(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the kernel's weight and bias; bias None makes it compute RMSNorm."""
        return self._weight_for(x), None

    def _weight_for(self, x: Tensor) -> Tensor:
        """Return the weight, or ones in the dtype of x if the norm has no weight."""
        return x.new_ones(x.shape[-1]) if self.weight is None else self.weight

    def _constants(self) -> dict[str, float]:
        return {"epsilon": self.epsilon, "offset": float(self.zero_centered)}


class RMSNorm(_Norm):
    """Divide by the root mean square, times a learned weight.

    Reference:
        Zhang and Sennrich 2019, arXiv:1910.07467.
    """


class LayerNorm(_Norm):
    """Subtract the mean, divide by the standard deviation, times a weight, plus a bias if any.

    Reference:
        Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(self, size: int, *, bias: bool = True, **options: Any) -> None:
        """Allocate weight and, with ``bias``, a bias; ``options`` are those of ``RMSNorm``."""
        super().__init__(size, **options)
        self.bias = None
        if bias and self.weight is not None:
            self.bias = nn.Parameter(torch.zeros_like(self.weight))

    def parameters_of_kernel(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight and bias; zeros for a norm without a bias."""
        weight = self._weight_for(x)
        return weight, torch.zeros_like(weight) if self.bias is None else self.bias


def build_norm(
    config: TransformerConfig,
    size: int,
    *,
    replicas: Axis = SINGLE,
    partial: Axis = SINGLE,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> RMSNorm | LayerNorm:
    """Build the norm of ``config.normalization`` over ``size`` channels."""
    options: dict[str, Any] = {
        "epsilon": config.norm_epsilon,
        "zero_centered": config.apply_layernorm_1p,
        "weight": config.norm_weight,
        "replicas": replicas,
        "partial": partial,
        "device": device,
        "dtype": dtype,
    }
    if config.normalization == "RMSNorm":
        return RMSNorm(size, **options)
    return LayerNorm(size, bias=config.norm_bias, **options)


class SplitRMSNorm(nn.Module):
    """RMSNorm of all heads together, over channels that are split over the ranks of an axis.

    Reference:
        OLMo team 2024, arXiv:2501.00656, section 3: norms of complete queries and keys.
    """

    def __init__(
        self,
        size: int,
        *,
        epsilon: float = 1e-5,
        zero_centered: bool = False,
        axis: Axis = SINGLE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's share of the weight, initialized to the identity.

        Args:
            size: channels over all ranks.
            epsilon: added to the mean square.
            zero_centered: store the weight minus 1.
            axis: ranks that split the channels evenly.
            device: of the weight.
            dtype: of the weight.
        """
        super().__init__()
        self.size, self.epsilon, self.zero_centered = size, epsilon, zero_centered
        self.axis = axis
        self.weight = _identity(size // axis.size, zero_centered, device, dtype)

    def forward(self, x: Float[Tensor, "*B d"]) -> Float[Tensor, "*B d"]:
        """Norm the last dimension; all-reduces each token's sum of squares and its gradient."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(-1, keepdim=True)
        # reduce_from sums in forward. Every rank's output depends on that sum, so copy_to
        # sums the gradient in backward.
        total = reduce_from(copy_to(squares, self.axis), self.axis)
        normed = wide * torch.rsqrt(total / self.size + self.epsilon)
        return (normed * weight).to(x.dtype)

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the weight."""
        return {"weight": sliced_layout("", (self.size,), 0, self.axis)}


class HeadNorm(nn.Module):
    """LayerNorm or RMSNorm of each head separately, with its own weight.

    A rank holds the weights of its own heads.

    Reference:
        Cohere 2024, Command R+ release: norms of queries and keys, without biases.
    """

    def __init__(
        self,
        config: TransformerConfig,
        heads: int,
        *,
        axis: Axis = SINGLE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's weights, initialized to the identity.

        Args:
            config: of the model: kind of norm, epsilon, whether weights are stored minus 1.
            heads: over all ranks.
            axis: ranks that split the heads evenly.
            device: of the weights.
            dtype: of the weights.
        """
        super().__init__()
        self.config, self.heads, self.axis = config, heads, axis
        H, zero_centered = head_dim(config), config.apply_layernorm_1p
        weight = _identity(heads // axis.size * H, zero_centered, device, dtype)
        self.weight = nn.Parameter(weight.unflatten(0, (-1, H)).detach())

    def forward(self, x: Float[Tensor, "*B n H"]) -> Float[Tensor, "*B n H"]:
        """Norm the last dimension, in float32 or wider."""
        config = self.config
        weight = self.weight + 1 if config.apply_layernorm_1p else self.weight
        norm = F.rms_norm if config.normalization == "RMSNorm" else F.layer_norm
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (norm(wide, x.shape[-1:], eps=config.norm_epsilon) * weight).to(x.dtype)

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the weight."""
        return {"weight": sliced_layout("", (self.heads, head_dim(self.config)), 0, self.axis)}


def l2_normed(x: Float[Tensor, "*B H"], epsilon: float) -> Float[Tensor, "*B H"]:
    """Divide by the root mean square of the last dimension, in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def _identity(
    size: int, zero_centered: bool, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    value = 0.0 if zero_centered else 1.0
    return nn.Parameter(torch.full((size,), value, device=device, dtype=dtype))
