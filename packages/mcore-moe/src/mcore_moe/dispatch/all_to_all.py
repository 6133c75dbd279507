"""Dispatch and combine by an all-to-all of rows, in parts if a rank would get too many rows.

A row is one token's copy for one of its experts. The routing determines how many rows a rank
receives: at worst all rows of all ranks. ``moe_expert_rows_limit`` bounds the rows that a rank
computes at once, as a multiple of the mean. If one rank would receive more, all ranks exchange
and compute in several parts, and backward recomputes each part: uneven routing then costs time
but no memory, and balanced routing runs in one part. The rows that a rank sends and gets back
are at most k for each of its tokens. If no rank exceeds the limit, ``moe_split_batch_overlap``
splits the rows in two halves: the exchange of one half overlaps the GEMMs of the other half, in
forward and backward.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_moe.config import MoEConfig
from mcore_moe.dispatch.local import plan_choices
from mcore_moe.dispatch.permutation import (
    RowPlan,
    permute,
    permute_probs,
    plan_rows,
    trimmed,
    unpermute,
)
from mcore_moe.dispatch.protocol import (
    DEFAULT_OPTIONS,
    DispatchedTokens,
    Dispatcher,
    DispatchOptions,
    Overlap,
    RunExperts,
)
from mcore_moe.dispatch.uneven_collectives import gather_uneven, reduce_scatter_uneven
from mcore_moe.experts.fp8_rows import exchange_narrow, wire_casts
from mcore_moe.routing.topk import Routing
from mcore_parallel.autograd.recomputing import recompute
from mcore_parallel.collectives import OverlapCallback, all_gather, all_to_all, begin_all_to_all
from mcore_parallel.mesh import SINGLE, Axis


@dataclass(frozen=True, slots=True)
class AllToAllSplits:
    """Row counts of one exchange, in the direction of dispatch; combine swaps both."""

    send: list[int]
    """Rows that this rank sends to each rank of ``ep``."""
    receive: list[list[int]]
    """Rows from each rank of ``ep``, as each rank of ``expert_tp`` receives them."""
    by_source: Int[Tensor, "n e"]
    """Rows for each of this rank's experts, by source rank: ``expert_tp`` x ``ep``."""

    @property
    def gathered(self) -> list[int]:
        """Rows that each rank of ``expert_tp`` receives."""
        return [sum(rows) for rows in self.receive]

    def part(self, part: int, num_parts: int) -> "AllToAllSplits":
        """Return the counts of one part: the same share of what each rank sends to each."""

        def size(num_rows: int) -> int:
            cut = _segment(num_rows, part, num_parts)
            return cut.stop - cut.start

        # A source's rows are sorted by expert: expert e has the rows from ends[e - 1] to
        # ends[e], and the part those from low to high. Each expert keeps the overlap.
        ends = self.by_source.cumsum(1)
        total = ends[:, -1:]
        low, high = total * part // num_parts, total * (part + 1) // num_parts
        by_source = ends.clamp(low, high) - (ends - self.by_source).clamp(low, high)
        return AllToAllSplits(
            [size(rows) for rows in self.send],
            [[size(rows) for rows in sources] for sources in self.receive],
            by_source,
        )


class AllToAllDispatcher(Dispatcher):
    """Sends each row to the rank of its expert and back, by all-to-all."""

    def __init__(self, config: MoEConfig, ep: Axis, expert_tp: Axis = SINGLE) -> None:
        self.config, self.ep, self.expert_tp = config, ep, expert_tp
        self.overlap_callback: OverlapCallback = None

    def set_overlap_callback(self, callback: OverlapCallback) -> None:
        """Set the function that is called while rows, sums or their gradients are exchanged."""
        self.overlap_callback = callback

    def run(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        experts: RunExperts,
        options: DispatchOptions = DEFAULT_OPTIONS,
    ) -> Float[Tensor, "T D"]:
        """Dispatch, compute and combine, in as many parts as the limit of rows requires.

        Exchanges over ``ep`` and ``expert_tp`` once for each part. Rows are split in the order
        of their experts, so most experts have all their rows in one part. By rounding, a part
        may exceed the limit by one row for each sending rank. ``options.overlap`` is called
        if there is one part, or if two parts overlap.
        """
        limit, splits_batch = (
            self.config.moe_expert_rows_limit,
            self.config.moe_split_batch_overlap,
        )
        if not limit and not splits_batch:
            return super().run(x, routing, experts, options)
        plan = plan_choices(routing, self.config)
        splits, totals = self.exchange_counts(plan.counts)
        plan = trimmed(plan, sum(splits.send))
        rows, probs = permute(x, plan), permute_probs(routing.probs, plan)
        # The rank with most rows determines the number of parts. Every rank has all totals, so
        # all ranks compute the same number.
        mean = max(1.0, sum(totals) / len(totals))
        num_parts = max(1, ceil(max(totals) / (limit * mean))) if limit else 1
        if num_parts == 1 and not splits_batch:
            return unpermute(
                self._run_rows(experts, splits, rows, probs, options.overlap), plan
            )

        # Two parts that overlap, or parts that backward recomputes.
        overlaps = num_parts == 1
        num_parts = 2 if overlaps else num_parts
        part_splits = [splits.part(part, num_parts) for part in range(num_parts)]
        row_parts, prob_parts = (_cut(x, splits.send, num_parts) for x in (rows, probs))
        parts = list(zip(part_splits, row_parts, prob_parts, strict=True))
        if overlaps:
            outputs = self._run_overlapped(experts, parts, options.overlap)
        else:
            outputs = [recompute(partial(self._run_rows, experts), *part) for part in parts]
        # ``outputs`` are sorted by part, then by destination rank; ``unpermute`` needs the
        # order of ``rows``: by destination rank, then by part.
        blocks = [y.split(part.send) for y, part in zip(outputs, part_splits, strict=True)]
        y = torch.cat([rows for block in zip(*blocks, strict=True) for rows in block])
        return unpermute(y, plan)

    def dispatch(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        options: DispatchOptions = DEFAULT_OPTIONS,
    ) -> DispatchedTokens:
        """Exchange counts, then rows and weights, over ``ep``; gather them over ``expert_tp``.

        The host waits once for the counts of all ranks.
        """
        plan = plan_choices(routing, self.config)
        splits, _ = self.exchange_counts(plan.counts)
        plan = trimmed(plan, sum(splits.send))
        rows, probs = permute(x, plan), permute_probs(routing.probs, plan)
        dispatched = self.dispatch_rows(rows, probs, splits, options.overlap)
        return replace(dispatched, handle=(plan, splits))

    def combine(
        self, y: Float[Tensor, "M D"], handle: tuple[RowPlan, AllToAllSplits]
    ) -> Float[Tensor, "T D"]:
        """Reverse dispatch: sum over ``expert_tp``, all-to-all over ``ep``, sum by token."""
        plan, splits = handle
        return unpermute(self.combine_rows(y, splits), plan)

    def exchange_counts(self, counts: Int[Tensor, " E"]) -> tuple[AllToAllSplits, list[int]]:
        """Exchange counts over ``ep`` and ``expert_tp``; the host waits for the result.

        Args:
            counts: rows of this rank for each expert.

        Returns:
            The counts of this rank's exchange, and the rows that each rank of ``ep`` computes.
        """
        ep = self.ep
        num_local = counts.numel() // ep.size
        by_ep = all_gather(counts[None], ep)  # [ep, E]
        by_rank = all_gather(by_ep[None], self.expert_tp)  # [expert_tp, ep, E]
        # This rank's experts are a contiguous range: [expert_tp, ep, E] -> [expert_tp, ep, e]
        by_source = by_rank.narrow(2, ep.rank * num_local, num_local)
        send = counts.view(ep.size, -1).sum(1)
        totals = by_rank.sum((0, 1)).view(ep.size, -1).sum(1)
        # One copy to the host for all three numbers: each copy waits for the device.
        on_host = torch.cat([send, totals, by_source.sum(-1).reshape(-1)]).tolist()
        received = on_host[2 * ep.size :]  # [expert_tp * ep]
        receive = [received[i : i + ep.size] for i in range(0, len(received), ep.size)]
        splits = AllToAllSplits(on_host[: ep.size], receive, by_source.flatten(0, 1))
        return splits, on_host[ep.size : 2 * ep.size]

    def dispatch_rows(
        self,
        rows: Float[Tensor, "R D"],
        probs: Float[Tensor, " R"],
        splits: AllToAllSplits,
        overlap: Overlap | None = None,
    ) -> DispatchedTokens:
        """Send rows, sorted by expert, to the ranks of their experts.

        Args:
            rows: of this rank's tokens.
            probs: weight of each row.
            splits: row counts of the exchange.
            overlap: called during the exchange if it is asynchronous.
        """
        wait = self.begin_dispatch_rows(rows, probs, splits)
        if overlap is not None and self._is_async():
            overlap()
        return wait()

    def begin_dispatch_rows(
        self, rows: Float[Tensor, "R D"], probs: Float[Tensor, " R"], splits: AllToAllSplits
    ) -> Callable[[], DispatchedTokens]:
        """Begin ``dispatch_rows``; return a function that waits for the rows."""
        probs = self._exchange(probs, splits)
        wait = self.begin_exchange(rows, splits)
        experts = _experts_of_rows(splits.by_source, sum(splits.gathered))
        plan = plan_rows(experts, splits.by_source.shape[1])
        return lambda: DispatchedTokens(wait(), probs[:, None], plan, splits)

    def begin_exchange(
        self, rows: Float[Tensor, "R D"], splits: AllToAllSplits
    ) -> Callable[[], Tensor]:
        """Begin to send rows in the format of ``moe_dispatch_dtype``.

        Returns a function that waits for the received rows.
        """
        if self._is_async():
            sizes = splits.send, splits.receive[0]
            casts = wire_casts(self.config, rows)
            return begin_all_to_all(rows, self.ep, *sizes, self.overlap_callback, **casts).wait
        exchange = partial(self._exchange, splits=splits)
        if self.config.moe_dispatch_dtype:
            received = exchange_narrow(
                rows, exchange, lambda grad: self.combine_rows(grad, splits)
            )
        else:
            received = exchange(rows)
        return lambda: received

    def _exchange(self, x: Tensor, splits: AllToAllSplits) -> Tensor:
        x = all_to_all(x, self.ep, splits.send, splits.receive[self.expert_tp.rank])
        return gather_uneven(x, self.expert_tp, splits.gathered)

    def _is_async(self) -> bool:
        """Whether the host launches other work during the exchange."""
        return self.expert_tp.size == 1 and not torch.compiler.is_compiling()

    def combine_rows(
        self, y: Float[Tensor, "M D"], splits: AllToAllSplits
    ) -> Float[Tensor, "R D"]:
        """Return the experts' outputs to the ranks that sent the rows, in the rows' order."""
        y = reduce_scatter_uneven(y, self.expert_tp, splits.gathered)
        sizes = splits.receive[self.expert_tp.rank], splits.send
        if self.overlap_callback is None or self.ep.size == 1:
            return all_to_all(y, self.ep, *sizes)
        return begin_all_to_all(y, self.ep, *sizes, self.overlap_callback).wait()

    def begin_combine_rows(
        self, y: Float[Tensor, "M D"], splits: AllToAllSplits
    ) -> Callable[[], Tensor]:
        """Begin ``combine_rows``; return a function that waits for the outputs."""
        if not self._is_async():
            outputs = self.combine_rows(y, splits)
            return lambda: outputs
        sizes = splits.receive[0], splits.send
        return begin_all_to_all(y, self.ep, *sizes, self.overlap_callback).wait

    def _run_rows(
        self,
        experts: RunExperts,
        splits: AllToAllSplits,
        rows: Tensor,
        probs: Tensor,
        overlap: Overlap | None = None,
    ) -> Tensor:
        """Dispatch rows, run the experts and return the outputs in the rows' order."""
        dispatched = self.dispatch_rows(rows, probs, splits, overlap)
        return self.combine_rows(
            experts(dispatched.x, dispatched.probs, dispatched.plan), splits
        )

    def _run_overlapped(
        self,
        experts: RunExperts,
        parts: list[tuple[AllToAllSplits, Tensor, Tensor]],
        overlap: Overlap | None,
    ) -> list[Tensor]:
        """Return the outputs of all parts; a part is computed while others are exchanged.

        Backward overlaps in the same way, beginning with the last part.
        """
        dispatching = [
            self.begin_dispatch_rows(rows, probs, splits) for splits, rows, probs in parts
        ]
        if overlap is not None:
            overlap()
        combining = []
        for wait in dispatching:
            dispatched = wait()
            y = experts(dispatched.x, dispatched.probs, dispatched.plan)
            combining.append(self.begin_combine_rows(y, dispatched.handle))
        return [wait() for wait in combining]


def _experts_of_rows(by_source: Int[Tensor, "n e"], num_rows: int) -> Int[Tensor, "R 1"]:
    """Return the expert of each row, of rows sorted by source and then by expert."""
    experts = torch.arange(by_source.shape[1], device=by_source.device)
    experts = experts.repeat(by_source.shape[0])
    # Without output_size repeat_interleave would wait for the device to compute the size.
    return experts.repeat_interleave(by_source.reshape(-1), output_size=num_rows)[:, None]


def _cut(x: Tensor, sizes: list[int], num_parts: int) -> list[Tensor]:
    """Split every block of ``x`` (``sizes`` rows) into segments; return one tensor per part."""
    blocks = x.split(sizes)
    return [
        torch.cat([block[_segment(len(block), part, num_parts)] for block in blocks])
        for part in range(num_parts)
    ]


def _segment(size: int, part: int, num_parts: int) -> slice:
    return slice(size * part // num_parts, size * (part + 1) // num_parts)
