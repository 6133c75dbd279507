"""The shared expert: a feed-forward network that processes every token.

The shared expert is split over tensor ranks like a dense layer, not over expert ranks.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mcore_moe.axes import ONE_RANK, MoEAxes
from mcore_moe.experts.network import DEFAULT_NETWORK, ExpertNetwork
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.rng import reset_weight_
from mcore_parallel.sharding import ParamLayout, whole_layout
from mcore_parallel.tensor_parallel.linear import (
    ColumnParallelLinear,
    LinearOutput,
    RowParallelLinear,
)


class SharedExpert(nn.Module):
    """A dense feed-forward network in parallel with the routed experts.

    Reference:
        Dai et al. 2024, DeepSeekMoE, section 3.2. arXiv:2401.06066. The gate is that of
        Qwen2-MoE: Yang et al. 2024, arXiv:2407.10671.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        network: ExpertNetwork = DEFAULT_NETWORK,
        *,
        axes: MoEAxes = ONE_RANK,
        has_token_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's part and initialise it.

        Args:
            hidden_size: D.
            ffn_hidden_size: F.
            network: activation, gate and initialisation; biases are ignored.
            axes: ranks that split F (``tp``), and whether they also split the tokens.
            has_token_gate: multiply the output by a learned sigmoid of the token.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        self.network = network
        factory_kwargs = {
            "axis": axes.tp,
            "sequence_parallel": axes.sequence_parallel,
            "device": device,
            "dtype": dtype,
        }
        names = ("gate", "up") if network.gated else ("",)
        outputs = [LinearOutput(name, ffn_hidden_size) for name in names]
        self.fc1 = ColumnParallelLinear(
            hidden_size, outputs, init_std=network.init_std, **factory_kwargs
        )
        self.fc2 = RowParallelLinear(
            ffn_hidden_size,
            hidden_size,
            init_std=network.fc2_std,
            **factory_kwargs,
        )
        self.token_gate = (
            _TokenGate(hidden_size, init_std=network.init_std, **factory_kwargs)
            if has_token_gate
            else None
        )

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """Return the shared expert's output for every token.

        Under sequence parallelism T is split over ``tp``: gathers and reduce-scatters over
        ``tp``. Otherwise all-reduces over ``tp``.
        """
        y = self.fc2(self.network.activate(self.fc1(x)))
        return y if self.token_gate is None else y * self.token_gate(x)


class _TokenGate(nn.Module):
    """A learned sigmoid gate: one number for each token."""

    def __init__(
        self,
        hidden_size: int,
        *,
        axis: Axis,
        sequence_parallel: bool,
        init_std: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.axis, self.init_std = axis, init_std
        self.partial = axis if sequence_parallel else SINGLE
        self.weight = nn.Parameter(torch.empty(1, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        reset_weight_(self, std=self.init_std, seed=seed)

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T 1"]:
        return F.linear(x, self.weight).sigmoid()

    def layouts(self) -> dict[str, ParamLayout]:
        shape = tuple(self.weight.shape)
        return {"weight": whole_layout("", shape, replicas=self.axis, partial=self.partial)}
