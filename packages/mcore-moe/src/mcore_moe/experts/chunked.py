"""Experts in parts: in a bounded memory, and one half beside the exchange of the other.

Routing decides how many rows a rank gets: at worst all tokens of all ranks choose its experts.
Here every rank computes at most a stated number of rows at once. If one rank would get more,
all ranks exchange and compute in as many parts as that takes, each of which forgets what it
computed and runs again in backward. So the worst routing costs time, never memory; even routing
costs nothing. What a rank sends and gets back is bounded by its own tokens. Where no rank gets
too many, the rows may be cut in two, so that the exchange of one half runs beside the GEMMs of
the other, forward and backward.

Where all tokens are gathered anyway the number of parts follows from the number of tokens: as
many as the worst routing takes, of which even routing fills the first. So the host waits for
no number, and the step may be a CUDA graph.
"""

from collections.abc import Callable
from functools import partial
from math import ceil

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_moe.dispatch.dispatching import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Trip,
    plan_kept,
)
from mcore_moe.dispatch.permutation import (
    RowPlan,
    permute,
    permute_probs,
    plan_slice,
    trimmed,
    unpermute,
)
from mcore_moe.dispatch.protocol import DispatchOptions, Overlap
from mcore_moe.dispatch.symmetric import SymmetricDispatcher
from mcore_moe.routing.topk import Routing
from mcore_parallel.recomputing import recompute

Compute = Callable[[Tensor, Tensor, RowPlan], Tensor]
"""``Experts``: sums by row, of rows, weights and their plan."""


def run_in_parts(
    dispatcher: AllToAllDispatcher,
    x: Float[Tensor, "T D"],
    routing: Routing,
    experts: Compute,
    limit: float,
    *,
    splits: bool = False,
    overlap: Overlap | None = None,
) -> Float[Tensor, "T D"]:
    """Dispatch, compute and combine with no more rows at once than a limit.

    Exchanges over ``ep`` and ``expert_tp`` as the dispatcher does, once for each part. Rows are
    cut in the order of their experts, so most experts have all their rows in one part.

    Args:
        dispatcher: of these ranks.
        x: this rank's tokens.
        routing: of the tokens.
        experts: of this rank.
        limit: rows that a rank computes at once, in units of the mean over the ranks; 0: any
            number. One row more for each rank that sends is possible, by rounding.
        splits: whether rows within the limit are cut in two halves that overlap.
        overlap: called while rows travel, if they are within the limit.
    """
    plan = plan_kept(routing, dispatcher.config)
    trip, totals = dispatcher.agree(plan.counts)
    plan = trimmed(plan, sum(trip.send))
    rows, probs = permute(x, plan), permute_probs(routing.probs, plan)
    mean = max(1.0, sum(totals) / len(totals))
    num_parts = max(1, ceil(max(totals) / (limit * mean))) if limit else 1
    is_within = num_parts == 1
    if is_within and not splits:
        return unpermute(_exchange(dispatcher, experts, trip, rows, probs, overlap), plan)

    num_parts = 2 if is_within else num_parts
    trips = [_part_of(trip, part, num_parts) for part in range(num_parts)]
    row_parts, prob_parts = (_cut(x, trip.send, num_parts) for x in (rows, probs))
    parts = list(zip(trips, row_parts, prob_parts, strict=True))
    if is_within:
        outputs = _overlapped(dispatcher, experts, parts, overlap)
    else:
        run = partial(_exchange, dispatcher, experts)
        outputs = [recompute(run, *part) for part in parts]
    # By destination and then by part, as the rows were.
    blocks = [y.split(own.send) for y, own in zip(outputs, trips, strict=True)]
    whole = torch.cat([rows for block in zip(*blocks, strict=True) for rows in block])
    return unpermute(whole, plan)


def _overlapped(
    dispatcher: AllToAllDispatcher,
    experts: Compute,
    parts: list[tuple[Trip, Tensor, Tensor]],
    overlap: Overlap | None,
) -> list[Tensor]:
    """Compute one part while others travel; backward runs the same way, last part first."""
    arriving = [dispatcher.begin_there(rows, probs, trip) for trip, rows, probs in parts]
    if overlap is not None:
        overlap()
    returning = []
    for arrive in arriving:
        sent = arrive()
        y = experts(sent.x, sent.probs, sent.plan)
        returning.append(dispatcher.begin_back(y, sent.handle))
    return [land() for land in returning]


def run_with_fixed_rows(
    dispatcher: AllGatherDispatcher,
    x: Float[Tensor, "T D"],
    routing: Routing,
    experts: Compute,
    limit: float,
    options: DispatchOptions,
) -> Float[Tensor, "T D"]:
    """Gather, compute and reduce-scatter with tensors whose sizes do not depend on routing.

    Communicates as the dispatcher does. The host waits for nothing if all ranks bring equally
    many tokens. Rows behind those of the first part are computed again in backward.

    Args:
        dispatcher: of these ranks.
        x: this rank's tokens.
        routing: of the tokens.
        experts: of this rank.
        limit: rows that a rank computes at once, in units of the mean over the ranks; as many
            as there are ranks of ``ep``: one part.
        options: of the tokens; ``overlap`` is called if they are in flight.
    """
    plan, sizes = dispatcher.plan(routing, options)
    x = dispatcher.tokens(x, sizes, options.in_flight)
    probs = dispatcher.there(routing.probs, sizes)
    num_tokens, topk = plan.slots.shape
    ranks = dispatcher.ep.size
    worst = num_tokens * min(topk, dispatcher.config.num_experts // ranks)
    size = max(1, min(worst, ceil(limit * num_tokens * topk / ranks)))
    y = experts(x, probs, plan_slice(plan, 0, min(size, worst)))
    for begin in range(size, worst, size):

        def run(x: Tensor, probs: Tensor, begin: int = begin) -> Tensor:
            return experts(x, probs, plan_slice(plan, begin, min(size, worst - begin)))

        y = y + recompute(run, x, probs)
    return dispatcher.combine(y, (sizes, options.equal_tokens))


def run_with_read_rows(
    dispatcher: SymmetricDispatcher,
    x: Float[Tensor, "T D"],
    routing: Routing,
    experts: Compute,
    limit: float,
    options: DispatchOptions,
) -> Float[Tensor, "T D"]:
    """Read, compute and sum rows in parts of fixed sizes, as ``run_with_fixed_rows`` does.

    Every part is exchanged by itself, so that what ranks have in memory is that of one.
    """
    places = dispatcher.plan(routing, options)
    worst, topk = places.sources.numel(), places.owners.shape[1]
    size = max(1, min(worst, ceil(limit * places.num_tokens * topk)))

    def run(x: Tensor, probs: Tensor, begin: int = 0) -> Tensor:
        part = places.part(begin, min(size, worst - begin))
        sent = dispatcher.there(x, probs, part)
        return dispatcher.combine(experts(sent.x, sent.probs, sent.plan), sent.handle)

    y = run(x, routing.probs)
    for begin in range(size, worst, size):
        y = y + recompute(partial(run, begin=begin), x, routing.probs)
    return y


def _exchange(
    dispatcher: AllToAllDispatcher,
    experts: Compute,
    trip: Trip,
    rows: Tensor,
    probs: Tensor,
    overlap: Overlap | None = None,
) -> Tensor:
    sent = dispatcher.there(rows, probs, trip, overlap)
    return dispatcher.back(experts(sent.x, sent.probs, sent.plan), trip)


def _cut(x: Tensor, sizes: list[int], num_parts: int) -> list[Tensor]:
    """Return parts, each with its segment of every block."""
    blocks = x.split(sizes)
    return [
        torch.cat([block[_segment(len(block), part, num_parts)] for block in blocks])
        for part in range(num_parts)
    ]


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
