"""Moving tokens to the ranks of their experts and the results back, see ``protocol``.

* ``LocalDispatcher``: all experts are on this rank; no communication.
* ``AllToAllDispatcher``: an all-to-all sends each row to its expert's rank, after the counts.
* ``AllGatherDispatcher``: all tokens are gathered on every rank, which keeps its own rows.
* ``symmetric.SymmetricDispatcher``: each rank reads its rows from the memory of the others.

Where ``expert_tp`` splits each expert's matrices, its ranks gather each other's rows and sum
their results. A rank may have any number of tokens, also none.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mcore_moe.config import MoEConfig, expert_capacity
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
    Dispatched,
    Dispatcher,
    DispatchOptions,
    Overlap,
)
from mcore_moe.dispatch.uneven_collectives import gather_uneven, reduce_scatter_uneven
from mcore_moe.experts.fp8_rows import exchange_narrow, packed, unpacked
from mcore_moe.routing.topk import Routing
from mcore_parallel.async_collectives import (
    InFlight,
    Meanwhile,
    begin_all_to_all,
    begin_gather_partial,
    begin_reduce_scatter,
)
from mcore_parallel.collectives import all_gather, all_to_all
from mcore_parallel.mesh import SINGLE, Axis


def build_dispatcher(
    config: MoEConfig, ep: Axis, expert_tp: Axis, levels: tuple[Axis, Axis] = (SINGLE, SINGLE)
) -> Dispatcher:
    """Return the dispatcher that the config names; the local one on one rank.

    Args:
        config: of the layer.
        ep: ranks that share the experts.
        expert_tp: ranks that share each expert's matrices.
        levels: ``ep`` between nodes and within one; of one rank each: tokens take one step.

    Raises:
        ValueError: if ``deepep`` is not installed, or ``expert_tp`` is more than one rank with
            it or ``symmetric``.
    """
    if ep.size == 1 and expert_tp.size == 1:
        return LocalDispatcher(config)
    if levels[0].size > 1:
        from mcore_moe.dispatch.hierarchical import HierarchicalDispatcher

        return HierarchicalDispatcher(config, *levels)
    kind = config.moe_token_dispatcher_type
    if kind in ("deepep", "symmetric") and expert_tp.size > 1:
        raise ValueError(
            f"--moe-token-dispatcher-type {kind} sends whole experts' tokens: use "
            f"--expert-tensor-parallel-size 1, not {expert_tp.size}, or alltoall."
        )
    if kind == "deepep":
        from mcore_moe.kernels.deepep import DeepEPDispatcher

        return DeepEPDispatcher(config, ep)
    if kind == "symmetric":
        from mcore_moe.dispatch.symmetric import SymmetricDispatcher

        return SymmetricDispatcher(config, ep)
    if kind == "allgather":
        return AllGatherDispatcher(config, ep, expert_tp)
    return AllToAllDispatcher(config, ep, expert_tp)


class LocalDispatcher(Dispatcher):
    """All experts are on this rank."""

    def __init__(self, config: MoEConfig) -> None:
        """Keep the config: number of experts, and padding to capacity."""
        self.config = config

    def dispatch(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        options: DispatchOptions = DEFAULT_OPTIONS,  # noqa: ARG002
    ) -> Dispatched:
        """Plan the rows; on a GPU the host does not wait for it.

        Tokens are rounded as if they had travelled.
        """
        if self.config.moe_dispatch_dtype:
            x = exchange_narrow(x, lambda x: x, lambda grad: grad)
        return Dispatched(x, routing.probs, plan_kept(routing, self.config), None)

    def combine(self, y: Float[Tensor, "M D"], handle: None) -> Float[Tensor, "T D"]:  # noqa: ARG002
        """Return the sums as they are."""
        return y


def plan_kept(routing: Routing, config: MoEConfig) -> RowPlan:
    """Plan the rows of this rank's choices, but those that are left out."""
    ids, fill = routing.ids, 0
    if config.moe_pad_expert_input_to_capacity:
        factor = config.moe_expert_capacity_factor
        fill = expert_capacity(ids.shape[0], config.num_experts, ids.shape[1], factor)
    return plan_rows(ids, config.num_experts, routing.keep, fill)


@dataclass(frozen=True, slots=True)
class Trip:
    """Row counts of one exchange, which the way back reverses."""

    send: list[int]
    """Rows that this rank sends to each rank of ``ep``."""
    receive: list[list[int]]
    """Rows from each rank of ``ep``, as each rank of ``expert_tp`` receives them."""
    chunks: Int[Tensor, "n e"]
    """Rows for each of this rank's experts, by source: ``expert_tp`` x ``ep``."""


class AllToAllDispatcher(Dispatcher):
    """Sends each row to the rank of its expert and back, by all-to-all."""

    def __init__(self, config: MoEConfig, ep: Axis, expert_tp: Axis = SINGLE) -> None:
        """Keep the config and the axes of the expert grid."""
        self.config, self.ep, self.expert_tp = config, ep, expert_tp
        self.meanwhile: Meanwhile = None

    def dispatch(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        options: DispatchOptions = DEFAULT_OPTIONS,
    ) -> Dispatched:
        """Exchange counts, then rows and weights, over ``ep``; gather them over ``expert_tp``.

        The host waits once for the counts of all ranks.
        """
        plan = plan_kept(routing, self.config)
        trip, _ = self.agree(plan.counts)
        plan = trimmed(plan, sum(trip.send))
        rows, probs = permute(x, plan), permute_probs(routing.probs, plan)
        return replace(self.there(rows, probs, trip, options.overlap), handle=(plan, trip))

    def combine(
        self, y: Float[Tensor, "M D"], handle: tuple[RowPlan, Trip]
    ) -> Float[Tensor, "T D"]:
        """Reverse dispatch: sum over ``expert_tp``, all-to-all over ``ep``, sum by token."""
        plan, trip = handle
        return unpermute(self.back(y, trip), plan)

    def agree(self, counts: Int[Tensor, " E"]) -> tuple[Trip, list[int]]:
        """Exchange counts over ``ep`` and ``expert_tp``; the host waits for them.

        Args:
            counts: rows of this rank for each expert.

        Returns:
            This rank's part, and the rows that each rank of ``ep`` computes.
        """
        ep = self.ep
        num_local = counts.numel() // ep.size
        by_source = all_gather(counts[None], ep)  # [ep, E]
        everyone = all_gather(by_source[None], self.expert_tp)  # [expert_tp, ep, E]
        chunks = everyone.narrow(2, ep.rank * num_local, num_local)
        send = counts.view(ep.size, -1).sum(1)
        totals = everyone.sum((0, 1)).view(ep.size, -1).sum(1)
        host = torch.cat([send, totals, chunks.sum(-1).reshape(-1)]).tolist()
        rest = host[2 * ep.size :]
        receive = [rest[i : i + ep.size] for i in range(0, len(rest), ep.size)]
        return Trip(host[: ep.size], receive, chunks.flatten(0, 1)), host[ep.size : 2 * ep.size]

    def there(
        self,
        rows: Float[Tensor, "R D"],
        probs: Float[Tensor, " R"],
        trip: Trip,
        overlap: Overlap | None = None,
    ) -> Dispatched:
        """Send rows, sorted by expert, to the ranks of their experts.

        Args:
            rows: of this rank's tokens.
            probs: weight of each.
            trip: their numbers.
            overlap: called while they travel, if no ``expert_tp`` gathers them after.
        """
        arrive = self.begin_there(rows, probs, trip)
        if overlap is not None and self._flies():
            overlap()
        return arrive()

    def begin_there(
        self, rows: Float[Tensor, "R D"], probs: Float[Tensor, " R"], trip: Trip
    ) -> Callable[[], Dispatched]:
        """Begin to send rows as ``there`` does; the function returned waits for them."""
        probs = self._exchange(probs, trip)
        arrive = self.begin_rows(rows, trip)
        num_rows = sum(sum(r) for r in trip.receive)
        plan = plan_rows(_experts_of_rows(trip.chunks, num_rows), trip.chunks.shape[1])
        return lambda: Dispatched(arrive(), probs[:, None], plan, trip)

    def begin_rows(self, rows: Float[Tensor, "R D"], trip: Trip) -> Callable[[], Tensor]:
        """Begin to send rows alone, in the dtype in which they travel."""
        if self._flies():
            send, receive = trip.send, trip.receive[0]
            cast = _casts(self.config, rows)
            flight = begin_all_to_all(rows, self.ep, send, receive, self.meanwhile, **cast)
            return flight.land
        exchange = partial(self._exchange, trip=trip)
        if self.config.moe_dispatch_dtype:
            arrived = exchange_narrow(rows, exchange, lambda grad: self.back(grad, trip))
        else:
            arrived = exchange(rows)
        return lambda: arrived

    def _exchange(self, x: Tensor, trip: Trip) -> Tensor:
        x = all_to_all(x, self.ep, trip.send, trip.receive[self.expert_tp.rank])
        return gather_uneven(x, self.expert_tp, [sum(r) for r in trip.receive])

    def _flies(self) -> bool:
        """Whether rows can travel while other work is launched."""
        return self.expert_tp.size == 1 and not torch.compiler.is_compiling()

    def back(self, y: Float[Tensor, "M D"], trip: Trip) -> Float[Tensor, "R D"]:
        """Return results to the ranks that sent the rows, in the order of these."""
        y = reduce_scatter_uneven(y, self.expert_tp, [sum(r) for r in trip.receive])
        send, receive = trip.receive[self.expert_tp.rank], trip.send
        if self.meanwhile is None or self.ep.size == 1:
            return all_to_all(y, self.ep, send, receive)
        return begin_all_to_all(y, self.ep, send, receive, self.meanwhile).land()

    def begin_back(self, y: Float[Tensor, "M D"], trip: Trip) -> Callable[[], Tensor]:
        """Begin to return results as ``back`` does; the function returned waits for them."""
        if not self._flies():
            done = self.back(y, trip)
            return lambda: done
        return begin_all_to_all(y, self.ep, trip.receive[0], trip.send, self.meanwhile).land


def _casts(config: MoEConfig, x: Tensor) -> dict[str, Any]:
    """Return the cast of tokens to what travels, and the cast back."""
    is_narrow = bool(config.moe_dispatch_dtype)
    return {"encode": packed, "decode": partial(unpacked, dtype=x.dtype)} if is_narrow else {}


def _experts_of_rows(chunks: Int[Tensor, "n e"], num_rows: int) -> Int[Tensor, "R 1"]:
    """Return the expert of each row, of rows sorted by source and then by expert."""
    experts = torch.arange(chunks.shape[1], device=chunks.device).repeat(chunks.shape[0])
    return experts.repeat_interleave(chunks.reshape(-1), output_size=num_rows)[:, None]


class AllGatherDispatcher(Dispatcher):
    """Gathers all tokens on every rank, which computes those that chose its experts.

    Moves k/ep times fewer bytes than all-to-all: the better one for many choices a token and
    few ranks. ``chunked.run_with_fixed_rows`` uses its parts where the host must not wait.
    """

    def __init__(self, config: MoEConfig, ep: Axis, expert_tp: Axis = SINGLE) -> None:
        """Keep the config and the axes of the expert grid."""
        self.config, self.ep, self.expert_tp = config, ep, expert_tp
        self.meanwhile: Meanwhile = None

    def begin(self, x: Float[Tensor, "T D"], *, equal_tokens: bool = False) -> InFlight | None:
        """Begin to gather tokens over ``ep``, if the ranks bring equally many."""
        if not equal_tokens or self.expert_tp.size > 1 or torch.compiler.is_compiling():
            return None
        cast = _casts(self.config, x)
        return begin_gather_partial(x, self.ep, self.meanwhile, **cast)

    def dispatch(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        options: DispatchOptions = DEFAULT_OPTIONS,
    ) -> Dispatched:
        """Gather tokens, choices and weights over ``ep`` and ``expert_tp``; keep own rows.

        The host waits for its number of rows, while tokens are gathered, and before that for
        the numbers of tokens of all ranks, unless these are even.
        """
        plan, sizes = self.plan(routing, options)
        num_rows = _to_host(plan.offsets[-1])
        x = self.tokens(x, sizes, options.in_flight)
        probs = self.there(routing.probs, sizes)
        return Dispatched(x, probs, trimmed(plan, num_rows()), (sizes, options.equal_tokens))

    def combine(
        self, y: Float[Tensor, "M D"], handle: tuple[list[list[int]], bool]
    ) -> Float[Tensor, "T D"]:
        """Sum what ranks have for each token over ``expert_tp`` and ``ep``, on its own rank."""
        sizes, equal_tokens = handle
        y = reduce_scatter_uneven(y, self.expert_tp, [sum(part) for part in sizes])
        # Not by the sizes: other ranks may have even ones where these do not.
        if self.meanwhile is None or self.ep.size == 1 or not equal_tokens:
            return reduce_scatter_uneven(y, self.ep, sizes[self.expert_tp.rank])
        return begin_reduce_scatter(y, self.ep, self.meanwhile).land()

    def plan(
        self, routing: Routing, options: DispatchOptions
    ) -> tuple[RowPlan, list[list[int]]]:
        """Gather the choices of all ranks, and plan the rows of those that are computed here.

        Args:
            routing: of this rank's tokens.
            options: of these. What overlaps with tokens in flight begins here. The host
                waits unless all ranks bring equally many.

        Returns:
            The plan, in which rows may follow that belong to no expert, and the number of
            tokens of each rank, ``[expert_tp][ep]``.
        """
        if options.in_flight is not None:
            if options.overlap is not None:
                options.overlap()
            options.in_flight.pause()
        ids, config = routing.ids, self.config
        if routing.keep is not None:
            ids = ids.where(routing.keep, config.num_experts)
        sizes = [[ids.shape[0]] * self.ep.size] * self.expert_tp.size
        if not options.equal_tokens:
            size = torch.tensor([[ids.shape[0]]], device=ids.device)
            sizes = all_gather(all_gather(size, self.ep, dim=1), self.expert_tp).tolist()
        num_local = config.num_experts // self.ep.size
        own = self.there(ids, sizes) - self.ep.rank * num_local
        keep = (own >= 0) & (own < num_local)
        return plan_rows(own.where(keep, 0), num_local, keep), sizes

    def tokens(
        self, x: Float[Tensor, "T D"], sizes: list[list[int]], in_flight: InFlight | None
    ) -> Float[Tensor, "M D"]:
        """Gather tokens, in the dtype in which they travel, or wait for those that travel."""
        if in_flight is not None:
            return in_flight.land()
        if not self.config.moe_dispatch_dtype:
            return self.there(x, sizes)
        gather = partial(self.there, sizes=sizes)
        return exchange_narrow(x, gather, partial(self.combine, handle=(sizes, False)))

    def there(self, x: Shaped[Tensor, "T ..."], sizes: list[list[int]]) -> Tensor:
        """Gather what all ranks have for their tokens; gradients are summed on the way back."""
        x = gather_uneven(x, self.ep, sizes[self.expert_tp.rank])
        return gather_uneven(x, self.expert_tp, [sum(s) for s in sizes])


def _to_host(number: Int[Tensor, ""]) -> Callable[[], int]:
    """Copy a number to the host; the function returned waits for it, for nothing after it."""
    if not number.is_cuda:
        return lambda: int(number)
    on_host, done = number.to("cpu", non_blocking=True), torch.cuda.Event()
    done.record()

    def wait() -> int:
        done.synchronize()
        return int(on_host)

    return wait
