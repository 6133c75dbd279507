"""A linear replicated over tensor ranks, for matrices too narrow to split."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.sharding import ParamLayout, whole_layout
from mcore_parallel.tensor_parallel.linear_autograd import column_parallel


class ReplicatedLinear(nn.Module):
    """``y = x W^T``, or ``x W^T + b``, the same on all tensor ranks.

    Under sequence parallelism each rank multiplies its own tokens, and its gradient of the
    weight is a part of a sum; otherwise all ranks multiply all tokens, and the gradient is
    complete.

    Attributes:
        weight: ``[F, D]``.
        bias: ``[F]`` or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: Axis = SINGLE,
        bias: bool = False,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate weight and bias: zeros until the model fills them.

        Args:
            in_features: D.
            out_features: F.
            axis: ranks that hold the weight.
            bias: whether the linear has a bias.
            sequence_parallel: whether the ranks have different tokens.
            device: of the weight.
            dtype: of the weight.
        """
        super().__init__()
        self.replicas = axis
        self.partial = axis if sequence_parallel else SINGLE
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))
            if bias
            else None
        )

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B F"]:
        """Return ``x W^T`` plus the bias, if there is one; no communication."""
        return column_parallel(x, self.weight, self.bias, SINGLE, False)

    def deferrable_weights(self) -> list[nn.Parameter]:
        """Return the weights whose gradients a ``WeightQueue`` may compute."""
        return [self.weight]

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of weight and bias."""
        return {
            name: whole_layout("", tuple(parameter.shape), self.replicas, self.partial)
            for name, parameter in self.named_parameters(recurse=False)
        }
