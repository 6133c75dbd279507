"""Statistics of a model's routers, and their update at the end of a step.

Routers count choices in every forward. Once a step, after gradients are final, ``finish_step``
sums the counts of all routers in one all-reduce, moves the expert biases and clears the
counts.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from mcore_moe.balance import updated_expert_bias
from mcore_moe.router import Router
from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis


@dataclass(frozen=True, slots=True)
class RouterStats:
    """Choices of one router in one step, all ranks together."""

    counts: Int[Tensor, " E"]

    @property
    def imbalance(self) -> float:
        """Rows of the busiest expert over the mean; 1.0 is perfect. Waits for the device."""
        return float(self.counts.max() * self.counts.numel() / self.counts.sum().clamp(min=1))

    @property
    def num_idle(self) -> int:
        """Number of experts that no token chose. Waits for the device."""
        return int((self.counts == 0).sum())


def routers(model: nn.Module) -> dict[str, Router]:
    """Find the routers of a model by path."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Router)}


def finish_step(model: nn.Module, axis: Axis = SINGLE) -> dict[str, RouterStats]:
    """Close a step for all routers: move expert biases in place, clear the counts.

    One all-reduce over ``axis``; all its ranks call this once a step. A model without routers
    does not communicate.

    Args:
        model: or a part of it; pipeline stages may have different numbers of routers.
        axis: all ranks that share a step's batch (tp x cp x dp).

    Returns:
        Statistics of each router, by path, on the model's device.
    """
    found = routers(model)
    if not found:
        return {}
    local = torch.stack([router.step_counts for router in found.values()])
    total = all_reduce(local, axis)  # [L, E]
    with torch.no_grad():
        for router, counts in zip(found.values(), total, strict=True):
            if router.expert_bias is not None:
                rate = router.config.moe_router_bias_update_rate
                router.expert_bias.copy_(updated_expert_bias(router.expert_bias, counts, rate))
            router.step_counts.zero_()
            router.step_scored_counts.zero_()
    return {name: RouterStats(counts) for name, counts in zip(found, total, strict=True)}
