"""Dispatch by gathering all tokens on every rank, combine by a reduce-scatter.

With ``moe_expert_rows_limit`` the experts compute parts with a fixed number of rows, which
follows from the number of tokens. There are as many parts as the worst routing needs; even
routing fills the first part only. The host waits for no count, so the step may be a CUDA graph.
"""

from collections.abc import Callable
from functools import partial
from math import ceil

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mcore_moe.config import MoEConfig
from mcore_moe.dispatch.permutation import RowPlan, plan_rows, plan_slice, trimmed
from mcore_moe.dispatch.protocol import (
    DEFAULT_OPTIONS,
    DispatchedTokens,
    Dispatcher,
    DispatchOptions,
    RunExperts,
)
from mcore_moe.dispatch.uneven_collectives import gather_uneven, reduce_scatter_uneven
from mcore_moe.experts.fp8_rows import exchange_narrow, wire_casts
from mcore_moe.routing.topk import Routing
from mcore_parallel.autograd.recomputing import recompute
from mcore_parallel.collectives import (
    CollectiveHandle,
    OverlapCallback,
    all_gather,
    begin_gather_partial,
    begin_reduce_scatter,
)
from mcore_parallel.mesh import SINGLE, Axis


class AllGatherDispatcher(Dispatcher):
    """Gathers all tokens on every rank, which computes the rows of its own experts.

    An all-gather moves ep/k times the bytes of an all-to-all: fewer if tokens have many choices
    and there are few ranks.
    """

    def __init__(self, config: MoEConfig, ep: Axis, expert_tp: Axis = SINGLE) -> None:
        self.config, self.ep, self.expert_tp = config, ep, expert_tp
        self.overlap_callback: OverlapCallback = None

    def set_overlap_callback(self, callback: OverlapCallback) -> None:
        """Set the function that is called while tokens, sums or gradients are exchanged.

        The function is not called if ranks have different numbers of tokens.
        """
        self.overlap_callback = callback

    def begin(
        self, x: Float[Tensor, "T D"], *, equal_tokens: bool = False
    ) -> CollectiveHandle | None:
        """Begin to gather tokens over ``ep``, if all ranks have equally many tokens."""
        if not equal_tokens or self.expert_tp.size > 1 or torch.compiler.is_compiling():
            return None
        casts = wire_casts(self.config, x)
        return begin_gather_partial(x, self.ep, self.overlap_callback, **casts)

    def run(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        experts: RunExperts,
        options: DispatchOptions = DEFAULT_OPTIONS,
    ) -> Float[Tensor, "T D"]:
        """Gather, compute and reduce-scatter; with a limit of rows, in parts of fixed size.

        With the limit no size depends on routing, and the host does not wait if all ranks have
        equally many tokens. Backward recomputes all parts but the first. If the limit is the
        number of ranks of ``ep`` or more, there is one part.
        """
        limit = self.config.moe_expert_rows_limit
        if not limit:
            return super().run(x, routing, experts, options)
        plan, sizes = self.plan(routing, options)
        x = self.gather_tokens(x, sizes, options.in_flight)
        probs = self.gather(routing.probs, sizes)
        num_tokens, topk = plan.slots.shape
        ranks = self.ep.size
        # At worst each token chooses k experts of this rank, or all if the rank has fewer.
        worst = num_tokens * min(topk, self.config.num_experts // ranks)
        size = max(1, min(worst, ceil(limit * num_tokens * topk / ranks)))
        y = experts(x, probs, plan_slice(plan, 0, min(size, worst)))
        for begin in range(size, worst, size):

            def run_part(x: Tensor, probs: Tensor, begin: int = begin) -> Tensor:
                return experts(x, probs, plan_slice(plan, begin, min(size, worst - begin)))

            y = y + recompute(run_part, x, probs)
        return self.combine(y, (sizes, options.equal_tokens))

    def dispatch(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        options: DispatchOptions = DEFAULT_OPTIONS,
    ) -> DispatchedTokens:
        """Gather tokens, choices and weights over ``ep`` and ``expert_tp``; plan local rows.

        The host waits for the number of local rows while tokens are gathered, and before that
        for the numbers of tokens of all ranks, unless ``options.equal_tokens``.
        """
        plan, sizes = self.plan(routing, options)
        num_rows = _to_host(plan.offsets[-1])
        x = self.gather_tokens(x, sizes, options.in_flight)
        probs = self.gather(routing.probs, sizes)
        return DispatchedTokens(
            x, probs, trimmed(plan, num_rows()), (sizes, options.equal_tokens)
        )

    def combine(
        self, y: Float[Tensor, "M D"], handle: tuple[list[list[int]], bool]
    ) -> Float[Tensor, "T D"]:
        """Reduce-scatter each token's output over ``expert_tp`` and ``ep`` to its own rank."""
        sizes, equal_tokens = handle
        y = reduce_scatter_uneven(y, self.expert_tp, [sum(part) for part in sizes])
        # All ranks must call the callback equally often. Equal sizes in this group are not
        # enough: sizes in other groups of ``ep`` may differ.
        if self.overlap_callback is None or self.ep.size == 1 or not equal_tokens:
            return reduce_scatter_uneven(y, self.ep, sizes[self.expert_tp.rank])
        return begin_reduce_scatter(y, self.ep, self.overlap_callback).wait()

    def plan(
        self, routing: Routing, options: DispatchOptions
    ) -> tuple[RowPlan, list[list[int]]]:
        """Gather the choices of all ranks, and plan the rows that this rank computes.

        The host waits unless ``options.equal_tokens``.

        Args:
            routing: of this rank's tokens.
            options: of the exchange; ``overlap`` is called here if tokens are in flight.

        Returns:
            The plan, which may end with rows of no expert, and the number of tokens of each
            rank, ``[expert_tp][ep]``.
        """
        if options.in_flight is not None:
            if options.overlap is not None:
                options.overlap()
            options.in_flight.run_overlap_callback()
        ids, config = routing.ids, self.config
        if routing.keep is not None:
            ids = ids.where(routing.keep, config.num_experts)
        sizes = [[ids.shape[0]] * self.ep.size] * self.expert_tp.size
        if not options.equal_tokens:
            size = torch.tensor([[ids.shape[0]]], device=ids.device)
            sizes = all_gather(all_gather(size, self.ep, dim=1), self.expert_tp).tolist()
        num_local = config.num_experts // self.ep.size
        local_ids = self.gather(ids, sizes) - self.ep.rank * num_local
        is_local = (local_ids >= 0) & (local_ids < num_local)
        return plan_rows(local_ids.where(is_local, 0), num_local, is_local), sizes

    def gather_tokens(
        self,
        x: Float[Tensor, "T D"],
        sizes: list[list[int]],
        in_flight: CollectiveHandle | None,
    ) -> Float[Tensor, "M D"]:
        """Gather tokens in ``moe_dispatch_dtype``, or wait for those in flight."""
        if in_flight is not None:
            return in_flight.wait()
        if not self.config.moe_dispatch_dtype:
            return self.gather(x, sizes)
        gather = partial(self.gather, sizes=sizes)
        return exchange_narrow(x, gather, partial(self.combine, handle=(sizes, False)))

    def gather(self, x: Shaped[Tensor, "T ..."], sizes: list[list[int]]) -> Tensor:
        """Gather the ranks' rows over ``ep`` and ``expert_tp``; backward sums the gradients."""
        x = gather_uneven(x, self.ep, sizes[self.expert_tp.rank])
        return gather_uneven(x, self.expert_tp, [sum(s) for s in sizes])


def _to_host(number: Int[Tensor, ""]) -> Callable[[], int]:
    """Begin to copy a number to the host; return a function that waits for the copy only."""
    if not number.is_cuda:
        return lambda: int(number)
    on_host, copied = number.to("cpu", non_blocking=True), torch.cuda.Event()
    copied.record()

    def wait() -> int:
        # Wait for the event, not for the stream: work launched after the copy continues.
        copied.synchronize()
        return int(on_host)

    return wait
