"""RMSNorm of an output that was gated first, group by group: the norm of a Mamba-2 layer."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.kernels.gated_norm import gated_norm
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import ParamLayout, sliced


class GatedNorm(nn.Module):
    """``norm(y * silu(z)) * weight``: RMSNorm of the gated output, group by group.

    Or ``norm(y) * weight * silu(z)``, as ``--mamba-norm`` says.

    Statistics are float32 or wider, the weight is applied in the input's dtype.
    """

    def __init__(
        self,
        size: int,
        num_groups: int,
        *,
        epsilon: float,
        gates_first: bool = True,
        axis: Axis,
        holders: Axis,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's weights, which begin as the identity.

        Args:
            size: channels over all ranks.
            num_groups: equal blocks of them, each normed for itself.
            epsilon: added to the mean square.
            gates_first: whether the output is gated before it is normed, or after.
            axis: ranks that share the channels.
            holders: ranks that share one group; their sums of squares are all-reduced.
            device: of the weight.
            dtype: of the weight.
        """
        super().__init__()
        self.size, self.epsilon, self.axis, self.holders = size, epsilon, axis, holders
        self.group_size, self.gates_first = size // num_groups, gates_first
        self.weight = nn.Parameter(torch.ones(size // axis.size, device=device, dtype=dtype))

    def forward(
        self, y: Float[Tensor, "*B F"], z: Float[Tensor, "*B F"]
    ) -> Float[Tensor, "*B F"]:
        """Gate, then norm; all-reduces over ``holders`` in forward and backward."""
        return gated_norm(
            y,
            z,
            self.weight,
            group_size=self.group_size,
            epsilon=self.epsilon,
            gates_first=self.gates_first,
            holders=self.holders,
        )

    def layouts(self) -> dict[str, ParamLayout]:
        """Describe the weight, see ``mcore_parallel.sharding``."""
        return {"weight": sliced("", (self.size,), 0, self.axis)}
