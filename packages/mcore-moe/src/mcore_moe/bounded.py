"""Experts in a bounded memory: a rank that gets too many rows computes them in parts.

Routing decides how many rows a rank gets: at worst all tokens of all ranks choose its experts.
Here every rank computes at most a stated number of rows at once. If one rank would get more,
all ranks exchange and compute in as many parts as that takes, each of which forgets what it
computed and runs again in backward. So the worst routing costs time, never memory; even routing
costs nothing. What a rank sends and gets back is bounded by its own tokens.

Where all tokens are gathered anyway the number of parts follows from the number of tokens: as
many as the worst routing takes, of which even routing fills the first. So the host waits for
no number, and the step may be a CUDA graph.
"""

from collections.abc import Callable
from math import ceil

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_moe.dispatching import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Beside,
    Trip,
    plan_kept,
)
from mcore_moe.permutation import RowPlan, part_of, permute, permute_probs, trimmed, unpermute
from mcore_moe.routing import Routing
from mcore_parallel.collectives import InFlight
from mcore_parallel.recomputing import recompute

Compute = Callable[[Tensor, Tensor, RowPlan], Tensor]
"""``Experts``: sums by row, of rows, weights and their plan."""


def run_bounded(
    dispatcher: AllToAllDispatcher,
    x: Float[Tensor, "T D"],
    routing: Routing,
    experts: Compute,
    limit: float,
    beside: Beside | None = None,
) -> Float[Tensor, "T D"]:
    """Dispatch, compute and combine with no more rows at once than a limit.

    Exchanges over ``ep`` and ``expert_tp`` as the dispatcher does, once for each part.

    Args:
        dispatcher: of these ranks.
        x: this rank's tokens.
        routing: of the tokens.
        experts: of this rank.
        limit: rows that a rank computes at once, in units of the mean over the ranks. One row
            more for each rank that sends is possible, by rounding.
        beside: called while rows travel, if they do so at once.
    """
    plan = plan_kept(routing, dispatcher.config)
    trip, totals = dispatcher.agree(plan.counts)
    plan = trimmed(plan, sum(trip.send))
    rows, probs = permute(x, plan), permute_probs(routing.probs, plan)
    mean = max(1.0, sum(totals) / len(totals))
    num_parts = max(1, ceil(max(totals) / (limit * mean)))
    if num_parts == 1:
        return unpermute(_exchange(dispatcher, experts, trip, rows, probs, beside), plan)

    outputs: list[list[Tensor]] = []
    row_blocks, prob_blocks = rows.split(trip.send), probs.split(trip.send)
    for part in range(num_parts):
        own = _part_of(trip, part, num_parts)
        inputs = [
            torch.cat([block[_segment(len(block), part, num_parts)] for block in blocks])
            for blocks in (row_blocks, prob_blocks)
        ]

        def run(rows: Tensor, probs: Tensor, own: Trip = own) -> Tensor:
            return _exchange(dispatcher, experts, own, rows, probs)

        outputs.append(list(recompute(run, *inputs).split(own.send)))
    # By destination and then by part, as the rows were.
    whole = torch.cat([block for blocks in zip(*outputs, strict=True) for block in blocks])
    return unpermute(whole, plan)


def run_with_fixed_rows(
    dispatcher: AllGatherDispatcher,
    x: Float[Tensor, "T D"],
    routing: Routing,
    experts: Compute,
    limit: float,
    *,
    is_even: bool,
    begun: InFlight | None,
    beside: Beside | None = None,
) -> Float[Tensor, "T D"]:
    """Gather, compute and reduce-scatter with tensors whose sizes do not depend on routing.

    Communicates as the dispatcher does. The host waits for nothing if ``is_even``. Rows behind
    those of the first part are computed again in backward.

    Args:
        dispatcher: of these ranks.
        x: this rank's tokens.
        routing: of the tokens.
        experts: of this rank.
        limit: rows that a rank computes at once, in units of the mean over the ranks; as many
            as there are ranks of ``ep``: one part.
        is_even: whether all ranks bring equally many tokens.
        begun: what ``dispatcher.begin`` returned for the tokens.
        beside: called while they travel, if they have begun.
    """
    if beside is not None and begun is not None:
        beside()
    plan, sizes = dispatcher.plan(routing, is_even)
    x = dispatcher.tokens(x, sizes, begun)
    probs = dispatcher.there(routing.probs, sizes)
    num_tokens, topk = plan.slots.shape
    ranks = dispatcher.ep.size
    worst = num_tokens * min(topk, dispatcher.config.num_experts // ranks)
    size = max(1, min(worst, ceil(limit * num_tokens * topk / ranks)))
    y = experts(x, probs, part_of(plan, 0, min(size, worst)))
    for begin in range(size, worst, size):

        def run(x: Tensor, probs: Tensor, begin: int = begin) -> Tensor:
            return experts(x, probs, part_of(plan, begin, min(size, worst - begin)))

        y = y + recompute(run, x, probs)
    return dispatcher.combine(y, sizes)


def _exchange(
    dispatcher: AllToAllDispatcher,
    experts: Compute,
    trip: Trip,
    rows: Tensor,
    probs: Tensor,
    beside: Beside | None = None,
) -> Tensor:
    sent = dispatcher.there(rows, probs, trip, beside)
    return dispatcher.back(experts(sent.x, sent.probs, sent.plan), trip)


def _segment(size: int, part: int, num_parts: int) -> slice:
    return slice(size * part // num_parts, size * (part + 1) // num_parts)


def _part_of(trip: Trip, part: int, num_parts: int) -> Trip:
    """Return the counts of one part: the same share of what each rank sends to each."""

    def size(rows: int) -> int:
        cut = _segment(rows, part, num_parts)
        return cut.stop - cut.start

    # A segment of rows sorted by expert: of each expert what lies between its ends.
    ends = trip.chunks.cumsum(1)
    total = ends[:, -1:]
    low, high = total * part // num_parts, total * (part + 1) // num_parts
    chunks = ends.clamp(low, high) - (ends - trip.chunks).clamp(low, high)
    return Trip(
        [size(rows) for rows in trip.send],
        [[size(rows) for rows in sources] for sources in trip.receive],
        chunks,
    )
