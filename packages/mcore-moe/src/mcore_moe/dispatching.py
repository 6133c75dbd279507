"""Moving tokens to the ranks of their experts and the results back.

A dispatcher has two methods: ``dispatch`` turns tokens and their routing into rows sorted by
this rank's experts, ``combine`` returns the experts' rows to their tokens' ranks and sums them
by token. A handle carries the state from one to the other, so a dispatcher has none and
several micro-batches may be in flight.

* ``LocalDispatcher``: all experts are on this rank; rows are sorted, no communication.
* ``AllToAllDispatcher``: an all-to-all sends each row to its expert's rank, after the counts.
* ``AllGatherDispatcher``: all tokens are gathered on every rank, which keeps its own rows.

Where ``expert_tp`` splits each expert's matrices, its ranks gather each other's rows and sum
their results. A rank may have any number of tokens, also none.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mcore_moe.config import MoEConfig, expert_capacity
from mcore_moe.permutation import (
    RowPlan,
    permute,
    permute_probs,
    plan_rows,
    reorder,
    trimmed,
    unpermute,
)
from mcore_moe.routing import Routing
from mcore_parallel.collectives import all_gather, all_to_all
from mcore_parallel.mesh import SINGLE, Axis


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows for this rank's experts."""

    rows: Float[Tensor, "R D"]
    """Sorted by expert."""
    probs: Float[Tensor, " R"]
    """Weight of each row."""
    offsets: Int[Tensor, " e1"]
    """Where the rows of each of this rank's experts begin, and the end of the last; int32."""
    handle: Any
    """State for ``combine`` of the same dispatcher."""

    @property
    def counts(self) -> Int[Tensor, " e"]:
        """Rows of each of this rank's experts."""
        return self.offsets.diff()


@runtime_checkable
class Dispatcher(Protocol):
    """Sends tokens to the ranks of their experts and returns the results."""

    def dispatch(self, x: Float[Tensor, "T D"], routing: Routing) -> Dispatched:
        """Collect the rows of this rank's experts."""
        ...

    def combine(self, rows: Float[Tensor, "R D"], handle: Any) -> Float[Tensor, "T D"]:
        """Return results to the ranks of their tokens and sum them by token."""
        ...


def build_dispatcher(config: MoEConfig, ep: Axis, expert_tp: Axis) -> Dispatcher:
    """Return the dispatcher that the config names; the local one on one rank."""
    if ep.size == 1 and expert_tp.size == 1:
        return LocalDispatcher(config)
    if config.moe_token_dispatcher_type == "allgather":
        return AllGatherDispatcher(config, ep, expert_tp)
    return AllToAllDispatcher(config, ep, expert_tp)


class LocalDispatcher:
    """All experts are on this rank."""

    def __init__(self, config: MoEConfig) -> None:
        """Keep the config: number of experts, and padding to capacity."""
        self.config = config

    def dispatch(self, x: Float[Tensor, "T D"], routing: Routing) -> Dispatched:
        """Sort the tokens by expert; on a GPU the host does not wait for it."""
        plan = plan_kept(routing, self.config)
        return Dispatched(
            permute(x, plan), permute_probs(routing.probs, plan), plan.offsets, plan
        )

    def combine(self, rows: Float[Tensor, "R D"], handle: RowPlan) -> Float[Tensor, "T D"]:
        """Sum the rows of each token."""
        return unpermute(rows, handle)


def plan_kept(routing: Routing, config: MoEConfig) -> RowPlan:
    """Plan the rows of this rank's choices, but those that are left out."""
    ids, fill = routing.ids, 0
    if config.moe_pad_expert_input_to_capacity:
        factor = config.moe_expert_capacity_factor
        fill = expert_capacity(ids.shape[0], config.num_experts, ids.shape[1], factor)
    return plan_rows(ids, config.num_experts, routing.keep, fill)


@dataclass(frozen=True, slots=True)
class _Trip:
    """Row counts and order of one dispatch, which ``AllToAllDispatcher.combine`` reverses."""

    plan: RowPlan
    send: list[int]
    """Rows that this rank sent to each rank of ``ep``."""
    receive: list[list[int]]
    """Rows from each rank of ``ep``, as each rank of ``expert_tp`` received them."""
    order: Tensor
    inverse: Tensor


class AllToAllDispatcher:
    """Sends each row to the rank of its expert and back, by all-to-all."""

    def __init__(self, config: MoEConfig, ep: Axis, expert_tp: Axis = SINGLE) -> None:
        """Keep the config and the axes of the expert grid."""
        self.config, self.ep, self.expert_tp = config, ep, expert_tp

    def dispatch(self, x: Float[Tensor, "T D"], routing: Routing) -> Dispatched:
        """Exchange counts, then rows and weights, over ``ep``; gather them over ``expert_tp``.

        The host waits once for the counts of all ranks.
        """
        plan = plan_kept(routing, self.config)
        counts = plan.counts
        chunks = self._chunks(counts)  # [expert_tp, ep, e]: rows by source and expert
        send_counts = counts.view(self.ep.size, -1).sum(1)
        host = torch.cat([send_counts, chunks.sum(-1).reshape(-1)]).tolist()
        send, rest = host[: self.ep.size], host[self.ep.size :]
        receive = [rest[i : i + self.ep.size] for i in range(0, len(rest), self.ep.size)]

        by_expert = plan_rows(
            _experts_of_rows(chunks.flatten(0, 1), sum(rest)), chunks.shape[2]
        )
        order, inverse = by_expert.choices, by_expert.slots[:, 0]
        plan = trimmed(plan, sum(send))
        trip = _Trip(plan, send, receive, order, inverse)
        rows = self._there(permute(x, plan), trip)
        probs = self._there(permute_probs(routing.probs, plan), trip)
        return Dispatched(rows, probs, by_expert.offsets, trip)

    def combine(self, rows: Float[Tensor, "R D"], handle: _Trip) -> Float[Tensor, "T D"]:
        """Reverse dispatch: sum over ``expert_tp``, all-to-all over ``ep``, sum by token."""
        rows = reorder(rows, handle.inverse, handle.order)
        rows = reduce_scatter_uneven(rows, self.expert_tp, [sum(r) for r in handle.receive])
        rows = all_to_all(rows, self.ep, handle.receive[self.expert_tp.rank], handle.send)
        return unpermute(rows, handle.plan)

    def _chunks(self, counts: Tensor) -> Tensor:
        num_local = counts.numel() // self.ep.size
        everyone = all_gather(counts[None], self.ep)  # [ep, E]
        mine = everyone.narrow(1, self.ep.rank * num_local, num_local)
        return all_gather(mine[None], self.expert_tp)

    def _there(self, x: Tensor, trip: _Trip) -> Tensor:
        received = trip.receive[self.expert_tp.rank]
        x = all_to_all(x, self.ep, trip.send, received)
        x = gather_uneven(x, self.expert_tp, [sum(r) for r in trip.receive])
        return reorder(x, trip.order, trip.inverse)


def _experts_of_rows(chunks: Int[Tensor, "n e"], num_rows: int) -> Int[Tensor, "R 1"]:
    """Return the expert of each row, of rows sorted by source and then by expert."""
    experts = torch.arange(chunks.shape[1], device=chunks.device).repeat(chunks.shape[0])
    return experts.repeat_interleave(chunks.reshape(-1), output_size=num_rows)[:, None]


class AllGatherDispatcher:
    """Gathers all tokens on every rank, which computes those that chose its experts."""

    def __init__(self, config: MoEConfig, ep: Axis, expert_tp: Axis = SINGLE) -> None:
        """Keep the config and the axes of the expert grid."""
        self.config, self.ep, self.expert_tp = config, ep, expert_tp

    def dispatch(self, x: Float[Tensor, "T D"], routing: Routing) -> Dispatched:
        """Gather tokens, choices and weights over ``ep`` and ``expert_tp``; keep own rows.

        The host waits for the numbers of tokens of all ranks, and for its number of rows.
        """
        ids, config = routing.ids, self.config
        if routing.keep is not None:
            ids = ids.where(routing.keep, config.num_experts)
        sizes = self._sizes(x)
        x = self._gather(x, sizes)
        probs, ids = self._gather(routing.probs, sizes), self._gather(ids, sizes)

        num_local = config.num_experts // self.ep.size
        own = ids - self.ep.rank * num_local
        keep = (own >= 0) & (own < num_local)
        plan = plan_rows(own.where(keep, 0), num_local, keep)
        plan = trimmed(plan, int(plan.offsets[-1]))
        return Dispatched(
            permute(x, plan), permute_probs(probs, plan), plan.offsets, (plan, sizes)
        )

    def combine(
        self, rows: Float[Tensor, "R D"], handle: tuple[RowPlan, list[list[int]]]
    ) -> Float[Tensor, "T D"]:
        """Sum each token's rows here, then over ``expert_tp`` and ``ep`` on its own rank."""
        plan, sizes = handle
        partial = unpermute(rows, plan)
        partial = reduce_scatter_uneven(partial, self.expert_tp, [sum(s) for s in sizes])
        return reduce_scatter_uneven(partial, self.ep, sizes[self.expert_tp.rank])

    def _sizes(self, x: Tensor) -> list[list[int]]:
        """Return the number of tokens of each rank, ``[expert_tp][ep]``."""
        size = torch.tensor([[x.shape[0]]], device=x.device)
        return all_gather(all_gather(size, self.ep, dim=1), self.expert_tp).tolist()

    def _gather(self, x: Tensor, sizes: list[list[int]]) -> Tensor:
        x = gather_uneven(x, self.ep, sizes[self.expert_tp.rank])
        return gather_uneven(x, self.expert_tp, [sum(s) for s in sizes])


def gather_uneven(
    x: Shaped[Tensor, "R ..."], axis: Axis, sizes: list[int]
) -> Shaped[Tensor, "Q ..."]:
    """Concatenate the ranks' rows in axis order; the gradient is summed over the ranks.

    Args:
        x: ``sizes[axis.rank]`` rows.
        axis: ranks that take part.
        sizes: rows of each rank; may hold zeros.
    """
    if axis.size == 1:
        return x
    copies = x.repeat(axis.size, *(1,) * (x.dim() - 1))
    return all_to_all(copies, axis, [x.shape[0]] * axis.size, sizes)


def reduce_scatter_uneven(
    x: Shaped[Tensor, "Q ..."], axis: Axis, sizes: list[int]
) -> Shaped[Tensor, "R ..."]:
    """Sum over the ranks, keeping own rows, in axis order; the gradient is gathered.

    Args:
        x: rows of all ranks.
        axis: ranks that take part.
        sizes: rows that each rank keeps; may hold zeros.
    """
    if axis.size == 1:
        return x
    own = sizes[axis.rank]
    parts = all_to_all(x, axis, sizes, [own] * axis.size)
    return parts.view(axis.size, own, *x.shape[1:]).sum(0)
