"""Dispatch on one rank, which holds all experts: a plan of the rows, no communication."""

from jaxtyping import Float
from torch import Tensor

from mcore_moe.config import MoEConfig, expert_capacity
from mcore_moe.dispatch.permutation import RowPlan, plan_rows
from mcore_moe.dispatch.protocol import (
    DEFAULT_OPTIONS,
    DispatchedTokens,
    Dispatcher,
    DispatchOptions,
)
from mcore_moe.experts.fp8_rows import exchange_narrow
from mcore_moe.routing.topk import Routing


class LocalDispatcher(Dispatcher):
    """Plans the rows of this rank's tokens, all of whose experts are on this rank."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def dispatch(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        options: DispatchOptions = DEFAULT_OPTIONS,  # noqa: ARG002
    ) -> DispatchedTokens:
        """Plan the rows; on a GPU the host does not wait for the plan.

        With ``moe_dispatch_dtype`` tokens are rounded as an exchange rounds them, so that the
        result does not depend on the number of ranks.
        """
        if self.config.moe_dispatch_dtype:
            x = exchange_narrow(x, lambda x: x, lambda grad: grad)
        return DispatchedTokens(x, routing.probs, plan_choices(routing, self.config), None)

    def combine(self, y: Float[Tensor, "M D"], handle: None) -> Float[Tensor, "T D"]:  # noqa: ARG002
        """Return ``y``, which the experts have summed by token already."""
        return y


def plan_choices(routing: Routing, config: MoEConfig) -> RowPlan:
    """Plan the rows of this rank's kept choices, padded to capacity by the config."""
    ids, capacity = routing.ids, 0
    if config.moe_pad_expert_input_to_capacity:
        factor = config.moe_expert_capacity_factor
        capacity = expert_capacity(ids.shape[0], config.num_experts, ids.shape[1], factor)
    return plan_rows(ids, config.num_experts, routing.keep, capacity)
