"""Dispatch in two steps over ranks of several nodes: between nodes, then within one.

A token is sent to another node once, even if several of its experts are there: to the rank with
the same index within that node, together with its choices and their weights. An all-to-all
within the node sends the token to the ranks of these experts. Combine sums by token within the
node first, so that one sum for each token and node is sent back.

Reference:
    DeepSeek-AI 2024, DeepSeek-V3, 3.2.2: tokens over InfiniBand, then NVLink.
    arXiv:2412.19437.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_moe.config import MoEConfig, one_step_option
from mcore_moe.dispatch.all_to_all import AllToAllDispatcher
from mcore_moe.dispatch.permutation import permute, plan_rows, trimmed, unpermute
from mcore_moe.dispatch.protocol import (
    DEFAULT_OPTIONS,
    DispatchedTokens,
    Dispatcher,
    DispatchOptions,
)
from mcore_moe.routing.topk import Routing
from mcore_parallel.collectives import all_to_all
from mcore_parallel.mesh import Axis


class HierarchicalDispatcher(Dispatcher):
    """Sends tokens to the nodes of their experts, then within a node to the experts' ranks."""

    def __init__(self, config: MoEConfig, nodes: Axis, node: Axis) -> None:
        """Build the dispatchers of both steps; no communication.

        Args:
            config: ``moe_dispatch_dtype`` applies to the exchange between nodes.
            nodes: the ranks with this rank's index within their nodes.
            node: ranks of this node, which share consecutive experts.
        """
        if problem := one_step_option(config):
            raise ValueError(problem)
        self.nodes, self.num_experts = nodes, config.num_experts // nodes.size
        node_config = replace(config, num_experts=self.num_experts, **_NO_CHOICE)
        self.between = AllToAllDispatcher(config, nodes)
        self.within = AllToAllDispatcher(replace(node_config, moe_dispatch_dtype=""), node)

    def dispatch(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        options: DispatchOptions = DEFAULT_OPTIONS,
    ) -> DispatchedTokens:
        """Exchange tokens, choices and weights between nodes, then rows within this node.

        The host waits for the counts of both exchanges.
        """
        ids, num_nodes = routing.ids, self.nodes.size
        if routing.keep is not None:
            ids = ids.where(routing.keep, self.num_experts * num_nodes)
        # has_expert[t, n]: node n has an expert of token t. Dropped choices, whose id is beyond
        # all experts, mark an extra column.
        has_expert = ids.new_zeros(ids.shape[0], num_nodes + 1, dtype=torch.bool)
        has_expert = has_expert.scatter_(1, ids // self.num_experts, True)[:, :num_nodes]
        nodes = torch.arange(num_nodes, device=ids.device).expand_as(has_expert)
        plan = plan_rows(nodes, num_nodes, has_expert)
        splits, _ = self.between.exchange_counts(plan.counts)
        plan = trimmed(plan, sum(splits.send))

        wait = self.between.begin_exchange(permute(x, plan), splits)
        sizes = splits.send, splits.receive[0]
        probs = all_to_all(permute(routing.probs, plan), self.nodes, *sizes)
        received_ids = all_to_all(ids[plan.sources], self.nodes, *sizes)
        # A token arrives with all of its choices; drop those of experts on other nodes.
        local_ids = received_ids - self.nodes.rank * self.num_experts
        keep = (local_ids >= 0) & (local_ids < self.num_experts)
        local_routing = Routing(local_ids.where(keep, 0), probs, keep)
        dispatched = self.within.dispatch(wait(), local_routing, options)
        return replace(dispatched, handle=(dispatched.handle, plan, splits))

    def combine(self, y: Float[Tensor, "M D"], handle: Any) -> Float[Tensor, "T D"]:
        """Sum by token within the node, send the sums between nodes, and sum them by token."""
        within, plan, splits = handle
        y = self.between.combine_rows(self.within.combine(y, within), splits)
        return unpermute(y, plan)


_NO_CHOICE: dict[str, Any] = {
    "moe_router_topk": 1,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": False,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_num_groups": 0,
    "moe_router_group_topk": 0,
    "moe_router_group_score_topk": 0,
}
"""Options that a dispatcher does not read, at values valid for any number of experts."""
