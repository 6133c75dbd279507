"""The dense feed-forward layer: widen, activate, narrow.

A gated layer multiplies an activated projection (gate) with a plain one (up); one weight
holds both, gate first, so that they are one GEMM.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.layers.xielu import XIELU
from mcore_moe.experts.network import DEFAULT_NETWORK, ExpertNetwork
from mcore_parallel.autograd.recomputing import recompute_between
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.precision.fp8 import PLAIN_GEMMS, LinearGemms
from mcore_parallel.tensor_parallel.linear import (
    ColumnParallelLinear,
    LinearOutput,
    RowParallelLinear,
)


class MLP(nn.Module):
    """Feed-forward layer whose inner width is split over the tensor ranks.

    Attributes:
        fc1: D to F, or to gate and up of F each.
        fc2: F to D.
        xielu: the activation, if it has parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        network: ExpertNetwork = DEFAULT_NETWORK,
        *,
        axis: Axis = SINGLE,
        sequence_parallel: bool = False,
        gemms: LinearGemms = PLAIN_GEMMS,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's share of the width and initialise it.

        Args:
            hidden_size: D.
            ffn_hidden_size: F over all ranks.
            network: gate, activation, biases and initialisation, as of one expert; its
                activation may also be xielu.
            axis: ranks that share the width.
            sequence_parallel: whether tokens are split over ``axis`` outside the layer.
            gemms: GEMMs of both linears.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: if the axis does not divide F.
        """
        super().__init__()
        self.network = network
        F_ = ffn_hidden_size
        factory_kwargs: dict[str, Any] = {
            "bias": network.bias,
            "axis": axis,
            "sequence_parallel": sequence_parallel,
            "device": device,
            "dtype": dtype,
        }
        outputs = [LinearOutput("gate", F_), LinearOutput("up", F_)] if network.gated else F_
        self.fc1 = ColumnParallelLinear(
            hidden_size,
            outputs,
            gemm=gemms.column,
            init_std=network.init_std,
            **factory_kwargs,
        )
        self.fc2 = RowParallelLinear(
            F_, hidden_size, gemm=gemms.row, init_std=network.fc2_std, **factory_kwargs
        )
        if network.activation == "xielu":
            self.xielu = XIELU(axis, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "s B D"]:
        """Transform every token; communicates as the two linears do."""
        hidden = self.fc1(x)
        if self.network.recompute_activation and self.training:
            return recompute_between(self._activate, self.fc2, hidden)
        return self.fc2(self._activate(hidden))

    def _activate(self, hidden: Tensor) -> Tensor:
        if self.network.activation == "xielu":
            return self.xielu(hidden)
        return self.network.activate(hidden)
