"""``MixtureOfExperts``: experts in place of a feed-forward layer of any torch model.

The module works inside any ``nn.Module``, under torch's DDP and ``torch.compile``. All experts
are on one rank unless ``axes`` distributes them; ``MoELayer`` has all options.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_moe.axes import ONE_RANK, MoEAxes
from mcore_moe.config import MoEConfig
from mcore_moe.experts.network import ExpertNetwork
from mcore_moe.layer import MoELayer
from mcore_parallel.collectives import all_reduce
from mcore_parallel.dtensors import is_dtensor

_LARGEST_SPREAD = 0.01
"""Largest difference of ranks' routers over their norm; rounding differs by far less."""


class MixtureOfExperts(nn.Module):
    """Drop-in replacement for a feed-forward layer.

    Attributes:
        moe: the ``MoELayer``.
        aux_loss: balancing loss of the last forward in training, times ``aux_loss_coeff``: add
            it to the loss before ``backward``. 0 in eval mode.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        top_k: int = 2,
        *,
        aux_loss_coeff: float = 0.01,
        gated: bool = True,
        activation: str = "silu",
        axes: MoEAxes = ONE_RANK,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the layer, and initialise it from torch's default generator.

        Args:
            hidden_size: D.
            ffn_hidden_size: width of one expert.
            num_experts: E.
            top_k: experts of each token; with 1 the weights are a softmax over all experts.
            aux_loss_coeff: of the load-balancing loss; 0 turns it off.
            gated: gated experts with three matrices, as SwiGLU; False: experts with two.
            activation: ``silu``, ``gelu``, ``relu`` or ``squared_relu``.
            axes: ranks that share the experts, ``moe_axes(ctx)`` of a layout with
                ``expert_model_parallel_size``.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: if ``top_k`` is not from 1 to ``num_experts``.
        """
        super().__init__()
        config = MoEConfig(
            num_experts=num_experts,
            moe_router_topk=top_k,
            moe_router_pre_softmax=top_k == 1,
            moe_aux_loss_coeff=aux_loss_coeff,
        )
        self.moe = MoELayer(
            hidden_size,
            ffn_hidden_size,
            config,
            ExpertNetwork(gated=gated, activation=activation),
            axes=axes,
            device=device,
            dtype=dtype,
        )
        self.aux_loss: Tensor = torch.zeros((), device=device)
        self._axes = axes
        self._num_passes = 0
        # After the router's forward its weight is complete, also if gathers overlap.
        self.moe.router.register_forward_hook(self._compare_routers)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Return the experts' output in the shape of x; set ``aux_loss``.

        In training, passes 1, 2, 4, 8 and so on all-reduce the router's weight over the ranks
        that share tokens or experts, to compare it; the host waits for the result.

        Raises:
            ValueError: on all these ranks, if their routers' weights differ.
        """
        y, self.aux_loss = self.moe(x.reshape(-1, x.shape[-1]))
        return y.view(x.shape)

    def _compare_routers(self, router: nn.Module, *_: Any) -> None:
        is_training = router.training and torch.is_grad_enabled()
        if not is_training or torch.compiler.is_compiling():
            return
        self._num_passes += 1
        weight = self.moe.router.weight.detach()
        is_due = self._num_passes & (self._num_passes - 1) == 0
        # A sharded weight has no replicas, and a graph's capture cannot wait for the host.
        if not is_due or is_dtensor(weight) or weight.is_meta:
            return
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        for axis in (self._axes.cp_tp, self._axes.ep):
            if axis.size == 1:
                continue
            # Largest and smallest weights over the ranks by one all-reduce: min(x) = -max(-x).
            signed = torch.stack([weight, -weight]).float()
            largest, minus_smallest = all_reduce(signed, axis, "max")
            spread = (largest + minus_smallest).norm()
            if spread > _LARGEST_SPREAD * (largest.norm() + minus_smallest.norm()):
                raise ValueError(
                    f"the router of MixtureOfExperts has different weights on ranks "
                    f"{list(axis.ranks)}, which share tokens or experts: they must be equal. "
                    "Each rank's gradient of a router is a term of a sum, which a plain "
                    "optimizer does not add: use DataParallel and DistributedOptimizer of "
                    "mcore_parallel, and seed torch equally on all ranks before the model is "
                    "built."
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with ``aux_loss`` detached: graphs cannot be copied or pickled."""
        return {**self.__dict__, "aux_loss": self.aux_loss.detach()}
