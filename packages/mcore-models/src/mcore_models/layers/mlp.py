"""The dense feed-forward layer: widen, activate, narrow.

A gated layer multiplies an activated projection (gate) with a plain one (up); one weight
holds both, gate first, so that they are one GEMM.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.layers.xielu import XIELU
from mcore_moe.activations import activation_function
from mcore_moe.kernels.gate import gated
from mcore_parallel.autograd.recomputing import recompute_between
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.precision.fp8 import PLAIN_GEMMS, LinearGemms
from mcore_parallel.tensor_parallel.linear import (
    ColumnParallelLinear,
    Output,
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
        *,
        gated: bool = True,
        activation: str = "silu",
        bias: bool = False,
        clamp: float = 0.0,
        offset: float = 0.0,
        axis: Axis = SINGLE,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        recompute_activation: bool = False,
        gemms: LinearGemms = PLAIN_GEMMS,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's share of the width and initialise it.

        Args:
            hidden_size: D.
            ffn_hidden_size: F over all ranks.
            gated: whether fc1 also computes a gate.
            activation: see ``mcore_moe.activations``; or xielu.
            bias: whether both linears have biases.
            clamp: of gates and up-projections, see ``mcore_moe.kernels.gate.gated``.
            offset: of up-projections, likewise.
            axis: ranks that share the width.
            sequence_parallel: whether tokens are split over ``axis`` outside the layer.
            init_std: of the weights; 0.0 leaves zeros and draws nothing.
            recompute_activation: free the input of fc2, and recompute it in backward.
            gemms: GEMMs of both linears.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: if the axis does not divide F.
        """
        super().__init__()
        self.gated, self.activation = gated, activation
        self.clamp, self.offset = clamp, offset
        self.recompute_activation = recompute_activation
        F_ = ffn_hidden_size
        factory_kwargs: dict[str, Any] = {
            "bias": bias,
            "axis": axis,
            "sequence_parallel": sequence_parallel,
        }
        factory_kwargs |= {"init_std": init_std, "device": device, "dtype": dtype}
        outputs = [Output("gate", F_), Output("up", F_)] if gated else F_
        self.fc1 = ColumnParallelLinear(
            hidden_size, outputs, gemm=gemms.column, **factory_kwargs
        )
        self.fc2 = RowParallelLinear(F_, hidden_size, gemm=gemms.row, **factory_kwargs)
        if activation == "xielu":
            self.xielu = XIELU(axis, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "s B D"]:
        """Transform every token; communicates as the two linears do."""
        hidden = self.fc1(x)
        if self.recompute_activation and self.training:
            return recompute_between(self._activate, self.fc2, hidden)
        return self.fc2(self._activate(hidden))

    def _activate(self, hidden: Tensor) -> Tensor:
        if self.gated:
            return gated(hidden, self.activation, self.clamp, self.offset)
        if self.activation == "xielu":
            return self.xielu(hidden)
        return activation_function(self.activation)(hidden)
