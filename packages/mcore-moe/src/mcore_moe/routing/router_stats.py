"""Statistics of a model's routers, and their update at the end of a step.

Routers count choices in every forward pass. Once a step, after backward, ``finish_step`` sums
the counts of all routers in one all-reduce, updates the expert biases and clears the counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mcore_moe.routing.load_balancing import updated_expert_bias
from mcore_moe.routing.router import Router
from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.optimizers.update_rule import unless_applied

LOAD_PERCENTILES = (10, 50, 90)
"""Percentiles of the experts' loads in ``SUMMARY_COLUMNS``."""

SUMMARY_COLUMNS = (
    "imbalance",
    "idle_experts",
    *(f"load_p{percent}" for percent in LOAD_PERCENTILES),
    "load_entropy",
    "dropped_share",
    "expert_bias_range",
    "load_balancing_loss",
    "z_loss",
)
"""Names of the columns of ``summarize``, in order."""


@dataclass(frozen=True, slots=True)
class RouterStats:
    """Counts and bias of one router in one step, over all ranks; on the model's device."""

    counts: Int[Tensor, " E"]
    """Choices of real tokens, including dropped choices."""
    num_dropped: Int[Tensor, ""]
    """Choices beyond their expert's capacity."""
    expert_bias: Float[Tensor, " E"] | None = None
    """Expert bias after its update; None without ``moe_router_enable_expert_bias``."""
    losses: Float[Tensor, " 2"] | None = None
    """Load-balancing loss and z-loss, means over the step's micro-batches, not multiplied by
    their coefficients; 0 for a loss whose coefficient is 0. None: unknown."""

    @property
    def imbalance(self) -> float:
        """Largest load of an expert over the mean; 1.0 is balanced. Waits for the device."""
        return float(summarize([self])[0, 0])

    @property
    def num_idle(self) -> int:
        """Number of experts that no token chose. Waits for the device."""
        return int((self.counts == 0).sum())


def summarize(stats: Sequence[RouterStats]) -> Float[Tensor, "L n"]:
    """Return the numbers of ``SUMMARY_COLUMNS`` for each router; does not wait for the device.

    Loads are counts divided by their mean. The entropy of the experts' shares is 1 for equal
    shares and 0 if one expert gets all choices. The range of the bias is its largest minus its
    smallest entry; 0 without a bias. Losses are not multiplied by their coefficients; 0 if not
    computed.

    Args:
        stats: of one or more routers, all with equally many experts.
    """
    counts = torch.stack([router.counts for router in stats])
    total = counts.sum(1, keepdim=True).clamp(min=1)
    shares = counts.float() / total
    load = shares * counts.shape[1]
    percents = torch.tensor(LOAD_PERCENTILES, device=load.device, dtype=load.dtype) / 100
    biases = [r.expert_bias for r in stats]
    ranges = [load.new_zeros(()) if b is None else (b.max() - b.min()).float() for b in biases]
    losses = [load.new_zeros(2) if r.losses is None else r.losses.to(load) for r in stats]
    columns = [
        load.amax(1),
        (counts == 0).sum(1).float(),
        *load.quantile(percents, dim=1),
        torch.special.entr(shares).sum(1) / log(max(2, counts.shape[1])),
        torch.stack([router.num_dropped for router in stats]) / total[:, 0],
        torch.stack(ranges),
        *torch.stack(losses, 1),
    ]
    return torch.stack(columns, 1)


def routers(model: nn.Module) -> dict[str, Router]:
    """Return the routers of a model by path."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Router)}


def finish_step(
    model: nn.Module, axis: Axis = SINGLE, is_applied: Bool[Tensor, ""] | None = None
) -> dict[str, RouterStats]:
    """Update expert biases in place, clear the step's counts, and return the statistics.

    One all-reduce over ``axis``; all ranks of ``axis`` call this function once a step. Without
    routers there is no communication.

    Args:
        model: a model or a part of it; pipeline stages may have different numbers of routers.
        axis: all ranks that share a step's batch (tp x cp x dp).
        is_applied: false: expert biases do not change, as in a skipped step; None: they do.

    Returns:
        Statistics of each router, by path, on the model's device.
    """
    model_routers = routers(model)
    if not model_routers:
        return {}
    # Counts are exact in float64, so that one all-reduce sums counts and losses.
    local = [
        torch.cat([r.step_counts.double(), r.step_dropped[None].double(), r.step_losses])
        for r in model_routers.values()
    ]
    total = all_reduce(torch.stack(local), axis)  # [L, E + 4]
    stats = {}
    with torch.no_grad():
        for (name, router), numbers in zip(model_routers.items(), total, strict=True):
            counts, num_dropped = numbers[:-4].long(), numbers[-4].long()
            *sums, num_passes = numbers[-3:]
            losses = torch.stack(sums) / num_passes.clamp(min=1)
            if router.expert_bias is not None:
                rate = router.config.moe_router_bias_update_rate
                with unless_applied(is_applied, (router.expert_bias,)):
                    bias = updated_expert_bias(router.expert_bias, counts, rate)
                    router.expert_bias.copy_(bias)
            bias = None if router.expert_bias is None else router.expert_bias.detach().clone()
            stats[name] = RouterStats(counts, num_dropped, bias, losses)
            for buffer in router.buffers():
                buffer.zero_()
    return stats
