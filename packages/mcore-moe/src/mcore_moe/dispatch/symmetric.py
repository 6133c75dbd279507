"""Dispatch and combine by reading the memory of the other GPUs of the node.

Each rank copies its tokens to a buffer that all ranks of ``ep`` can read. From the choices of
all ranks it computes the rows of its experts, and copies these rows from the buffers in the
order of the experts. The ranks of the tokens read the results and sum them. All sizes follow
from the number of tokens, so no number is copied to the host. This moves fewer rows than an
all-gather if a token has fewer choices than there are ranks. On a CPU the ranks all-gather the
buffers instead; this is the reference.
"""

import socket
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mcore_moe.config import MoEConfig
from mcore_moe.dispatch.permutation import RowPlan, plan_rows
from mcore_moe.dispatch.protocol import (
    DEFAULT_OPTIONS,
    DispatchedTokens,
    Dispatcher,
    DispatchOptions,
    RunExperts,
)
from mcore_moe.routing.topk import Routing
from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.autograd.recomputing import recompute
from mcore_parallel.collectives import all_gather
from mcore_parallel.mesh import Axis


@dataclass(frozen=True, slots=True)
class Places:
    """Sources of this rank's rows, and rank and row of the results of its tokens."""

    sources: Int[Tensor, " R"]
    """Choice of each row of this rank, numbered over the tokens of all ranks; -1: none."""
    owners: Int[Tensor, "T k"]
    """Rank that computes each choice of this rank's tokens; ``ep.size``: none."""
    rows: Int[Tensor, "T k"]
    """Row of the choice on that rank; outside of [0, R): none."""
    offsets: Int[Tensor, " e1"]
    """First row of each of this rank's experts, and the end of the last expert's rows."""
    num_tokens: int
    """Largest number of tokens of a rank, for which the buffers of all ranks have space."""

    def part(self, begin: int, size: int) -> "Places":
        """Return the places restricted to rows ``begin`` to ``begin + size`` of each rank."""
        sources, offsets = self.sources[begin : begin + size], self.offsets
        offsets = offsets.clamp(begin, begin + size) - begin
        return replace(self, sources=sources, rows=self.rows - begin, offsets=offsets)

    def plan(self) -> RowPlan:
        """Return the plan of this rank's rows, which are sorted by expert already."""
        num_rows = self.sources.numel()
        row = torch.arange(num_rows, device=self.sources.device, dtype=torch.int32)
        slots = row.where(row < self.offsets[-1], num_rows)[:, None]
        return RowPlan(row, slots, self.offsets, False, True, True)


class Exchange(Protocol):
    """Reads of the tensors of all ranks."""

    def gather(self, ids: Int[Tensor, "T k"]) -> Int[Tensor, "M k"]:
        """Return the choices of all ranks; every rank must pass equally many."""
        ...

    def pull(self, x: Tensor, probs: Tensor | None, places: Places) -> Any:
        """Return this rank's rows, from the tokens of all ranks, and the weights of its rows.

        Both are undefined after the rows of the last expert.
        """
        ...

    def add(self, y: Tensor, probs: Tensor | None, places: Places) -> Any:
        """Return sums over the rows of this rank's tokens, and ``probs`` of each choice."""
        ...


class SymmetricDispatcher(Dispatcher):
    """Reads rows from the ranks of the tokens, and results from the ranks of the experts."""

    def __init__(
        self,
        config: MoEConfig,
        ep: Axis,
        make_exchange: Callable[[Axis, torch.device], Exchange] | None = None,
    ) -> None:
        """Store the arguments; no communication.

        Args:
            config: of the layer.
            ep: ranks that share the experts, of one node.
            make_exchange: returns the ``Exchange`` of a device; None: ``Peers`` on GPUs, one
                for all layers, and ``Gathered`` on CPUs.
        """
        self.config, self.ep = config, ep
        self.make_exchange = make_exchange or _exchange

    def run(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        experts: RunExperts,
        options: DispatchOptions = DEFAULT_OPTIONS,
    ) -> Float[Tensor, "T D"]:
        """Read, compute and sum rows; with a limit of rows, in parts of fixed size.

        Each part is exchanged separately, so a rank holds the rows of one part at a time.
        Backward recomputes all parts but the first.
        """
        limit = self.config.moe_expert_rows_limit
        if not limit:
            return super().run(x, routing, experts, options)
        places = self.plan(routing, options)
        worst, topk = places.sources.numel(), places.owners.shape[1]
        size = max(1, min(worst, ceil(limit * places.num_tokens * topk)))

        def run_part(x: Tensor, probs: Tensor, begin: int = 0) -> Tensor:
            part = places.part(begin, min(size, worst - begin))
            dispatched = self.read_rows(x, probs, part)
            y = experts(dispatched.x, dispatched.probs, dispatched.plan)
            return self.combine(y, dispatched.handle)

        y = run_part(x, routing.probs)
        for begin in range(size, worst, size):
            y = y + recompute(partial(run_part, begin=begin), x, routing.probs)
        return y

    def dispatch(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        options: DispatchOptions = DEFAULT_OPTIONS,
    ) -> DispatchedTokens:
        """Read the rows of this rank's experts, padded to the number of the worst routing."""
        return self.read_rows(x, routing.probs, self.plan(routing, options))

    def combine(self, y: Float[Tensor, "R D"], handle: Places) -> Float[Tensor, "T D"]:
        """Read the rows of this rank's tokens and sum them by token."""
        return _SumRows.apply(y, self.exchange(y), handle)

    def read_rows(
        self, x: Float[Tensor, "T D"], probs: Float[Tensor, "T k"], places: Places
    ) -> DispatchedTokens:
        """Read the rows of this rank's experts, and their weights, from all ranks."""
        rows, weights = _ReadRows.apply(x, probs, self.exchange(x), places)
        return DispatchedTokens(rows, weights[:, None], places.plan(), places)

    def plan(self, routing: Routing, options: DispatchOptions) -> Places:
        """Plan the rows of all ranks from their choices, with room for the worst routing.

        The host waits for the numbers of tokens unless ``options.equal_tokens``.
        """
        ids, rank, num_experts = routing.ids, self.ep.rank, self.config.num_experts
        num_local = num_experts // self.ep.size
        if routing.keep is not None:
            ids = ids.where(routing.keep, num_experts)
        num_tokens, topk = ids.shape
        most_tokens = num_tokens
        if not options.equal_tokens:
            sizes = all_gather(torch.tensor([num_tokens], device=ids.device), self.ep)
            most_tokens = int(sizes.max())
        most_tokens = max(1, most_tokens)
        padded = F.pad(ids, (0, 0, 0, most_tokens - num_tokens), value=num_experts)
        all_ids = self.exchange(ids).gather(padded)
        plan = plan_rows(all_ids, num_experts, all_ids < num_experts)
        # The plan sorts the choices of all ranks by expert, so also by the expert's rank:
        # begins[r] is the first row of rank r, and this rank's rows are these global rows.
        begins = plan.offsets[::num_local]
        global_rows = torch.arange(all_ids.shape[0] * min(topk, num_local), device=ids.device)
        global_rows = global_rows + begins[rank]
        choices = F.pad(plan.choices, (0, 1))
        sources = choices[global_rows.clamp(max=choices.numel() - 1)]
        # For each choice of this rank's tokens: the rank that computes it, and its row there.
        first_token = rank * most_tokens
        local_tokens = slice(first_token, first_token + num_tokens)
        owners = all_ids[local_tokens] // num_local
        rows = plan.slots[local_tokens] - begins[owners]
        first_expert = rank * num_local
        return Places(
            sources.where(global_rows < begins[rank + 1], -1).int(),
            owners.int(),
            rows.where(owners < self.ep.size, -1).int(),
            (plan.offsets[first_expert : first_expert + num_local + 1] - begins[rank]).int(),
            most_tokens,
        )

    def exchange(self, x: Tensor) -> Exchange:
        """Return the exchange of tensors of a device."""
        return self.make_exchange(self.ep, x.device)


class Gathered:
    """Reference of ``Peers`` in plain torch: every rank gathers the tensors of all."""

    def __init__(self, ep: Axis) -> None:
        self.ep = ep

    def gather(self, ids: Int[Tensor, "T k"]) -> Int[Tensor, "M k"]:
        """See ``Exchange``."""
        return all_gather(ids, self.ep)

    def pull(self, x: Tensor, probs: Tensor | None, places: Places) -> Any:
        """See ``Exchange``."""
        padding, topk = places.num_tokens - x.shape[0], places.owners.shape[1]
        source, is_empty = places.sources.clamp(min=0), places.sources < 0
        all_tokens = all_gather(F.pad(x, (0, 0, 0, padding)), self.ep)
        rows = all_tokens[source // topk].masked_fill(is_empty[:, None], 0)
        if probs is None:
            return rows, None
        weights = all_gather(F.pad(probs, (0, 0, 0, padding)), self.ep).flatten()
        return rows, weights[source].masked_fill(is_empty, 0)

    def add(self, y: Tensor, probs: Tensor | None, places: Places) -> Any:
        """See ``Exchange``."""
        owners, rows, num_rows = places.owners, places.rows, y.shape[0]
        has_row = (owners < self.ep.size) & (rows >= 0) & (rows < num_rows)
        index = (owners * num_rows + rows).where(has_row, 0)  # in the gathered rows
        taken = all_gather(y, self.ep)[index].masked_fill(~has_row[..., None], 0)
        wide = torch.promote_types(y.dtype, torch.float32)
        sums = taken.sum(1, dtype=wide).to(y.dtype)  # [T, k, D] -> [T, D]
        if probs is None:
            return sums, None
        return sums, all_gather(probs, self.ep)[index].masked_fill(~has_row, 0)


class Peers:
    """Buffers of symmetric memory, shared by all layers, in which ranks read each other's rows.

    An exchange writes this rank's buffer, waits at a barrier for the other ranks, and reads
    their buffers, all in the order of one stream. A rank finishes its reads of exchange n
    before it arrives at the barrier of exchange n+1. So a buffer may be written again after the
    barrier of any later exchange, when all reads of the buffer are complete. Choices, rows and
    sums have separate buffers, so that an exchange needs one barrier if the previous exchange
    was of another kind. Two consecutive exchanges of one kind need a second barrier before the
    write; so does the first exchange after a CUDA graph begins or ends, since a graph may be
    replayed after any exchange. All ranks exchange in the same order, so all ranks add the
    second barrier to the same exchanges.

    Limitation: torch numbers the rendezvous of a process over all of its groups, and ranks wait
    for that number. If numbers of tokens differ, ranks of different ``ep`` groups make
    different numbers of rendezvous, and would hang if another group shared symmetric memory
    later. The only other user of symmetric memory is mcore-infer's whole-step kernel over
    tensor ranks, for models without experts.
    """

    def __init__(self, ep: Axis, device: torch.device, memory: Any = None) -> None:
        """Check that all ranks are on one node, by an all-gather of a checksum of its name.

        Args:
            ep: ranks that share the experts.
            device: of this rank.
            memory: allocates and connects buffers; None: torch's ``_symmetric_memory``.

        Raises:
            ValueError: on all ranks, if they are on several nodes, or torch has no symmetric
                memory.
        """
        by_device = "nccl" in torch.distributed.get_backend(ep.group)
        checksum = torch.tensor([crc32(socket.gethostname().encode())])
        num_nodes = all_gather(checksum.to(device if by_device else "cpu"), ep).unique().numel()
        if num_nodes > 1:
            raise ValueError(_refusal(f"they are on {num_nodes} nodes"))
        self.memory, self.device = memory or _memory(), device
        self.group: Any = ep.group
        self.buffers: dict[str, list[tuple[Tensor, Any, Tensor]]] = defaultdict(list)
        self.last: tuple[int, bool] | None = None

    def gather(self, ids: Int[Tensor, "T k"]) -> Int[Tensor, "M k"]:
        """See ``Exchange``."""
        (handle, _), _ = self._share("ids", ids.shape[0], ids)
        peers = range(self.group.size())
        return torch.cat([handle.get_remote_tensor(p, ids.shape, ids.dtype) for p in peers])

    def pull(self, x: Tensor, probs: Tensor | None, places: Places) -> Any:
        """See ``Exchange``."""
        from mcore_moe.kernels.peer_rows import pull_rows

        (_, table), offset = self._share("rows", places.num_tokens, x, probs)
        num_rows, sizes = places.sources.numel(), (places.num_tokens, places.owners.shape[1])
        rows = x.new_empty(num_rows, x.shape[1])
        weights = None if probs is None else probs.new_empty(num_rows)
        pull_rows(table, places.sources, places.offsets, rows, weights, offset, sizes)
        return rows, weights

    def add(self, y: Tensor, probs: Tensor | None, places: Places) -> Any:
        """See ``Exchange``."""
        from mcore_moe.kernels.peer_rows import sum_rows

        (_, table), offset = self._share("sums", y.shape[0], y, probs, places.offsets)
        sums = y.new_empty(places.owners.shape[0], y.shape[1])
        weights = None if probs is None else probs.new_empty(places.owners.shape)
        sum_rows(table, places.owners, places.rows, sums, weights, offset, y.shape[0])
        return sums, weights

    def _share(
        self,
        kind: str,
        num_rows: int,
        x: Tensor,
        probs: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> tuple[tuple[Any, Tensor], int]:
        """Copy tensors to this rank's buffer; the device waits until all ranks have done so.

        With ``offsets`` of experts only the rows of experts are copied.

        Returns:
            The handle and the addresses of all ranks' buffers; the byte at which ``probs``
            begins.
        """
        # Layout of a buffer: num_rows rows of x, then at a multiple of 16 bytes the weights.
        # The same on all ranks, so that one offset holds for all of them.
        row_bytes = x.shape[1] * x.element_size()
        offset = -(-num_rows * row_bytes // 16) * 16
        width = 0 if probs is None else probs.shape[1:].numel() * probs.element_size()
        buffer, handle, table = self._buffer(kind, offset + num_rows * width)
        # The same buffer as in the last exchange, or the begin or end of a graph: other ranks
        # may still read the buffer. Wait for them before the write.
        exchange = (buffer.data_ptr(), self._is_recorded())
        if self.last is not None and (
            self.last[0] == exchange[0] or self.last[1] != exchange[1]
        ):
            handle.barrier()
        self.last = exchange
        rows = _place_of(x, buffer)
        if offsets is None:
            rows.copy_(x)
        else:
            from mcore_moe.kernels.peer_rows import lay_rows

            lay_rows(rows, x.contiguous(), offsets)
        if probs is not None:
            _place_of(probs, buffer[offset:]).copy_(probs)
        handle.barrier()
        return (handle, table), offset

    def _buffer(self, kind: str, num_bytes: int) -> tuple[Tensor, Any, Tensor]:
        """Return a buffer of at least ``num_bytes``; allocates a new one if there is none.

        All ranks allocate in the same exchange. A new buffer is at most an eighth larger than
        required. Smaller buffers are kept, as CUDA graphs may use them.
        """
        for entry in self.buffers[kind]:
            if entry[0].numel() >= num_bytes:
                return entry
        if self._is_recorded():
            raise RuntimeError(
                "symmetric memory cannot be allocated while a CUDA graph is recorded: run one "
                "step before the recording."
            )
        # Rounded up to a sixteenth of the next power of two, so that sizes that vary a little
        # share a buffer.
        step = 1 << max(4, num_bytes.bit_length() - 4)
        size = -(-num_bytes // step) * step
        try:
            buffer = self.memory.empty(size, dtype=torch.uint8, device=self.device)
            handle = self.memory.rendezvous(buffer, self.group)
        except RuntimeError as error:
            raise ValueError(_refusal(str(error))) from error
        peers = range(self.group.size())
        buffers = [handle.get_remote_tensor(p, (size,), torch.uint8) for p in peers]
        table = torch.tensor([x.data_ptr() for x in buffers], device=self.device)
        self.buffers[kind].append((buffer, handle, table))
        return self.buffers[kind][-1]

    def _is_recorded(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _place_of(x: Tensor, buffer: Tensor) -> Tensor:
    """Return the first bytes of a buffer as a tensor of the shape and dtype of ``x``."""
    return buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)


def _memory() -> Any:
    try:
        from torch.distributed import _symmetric_memory
    except ImportError as error:
        raise ValueError(_refusal(f"torch {torch.__version__}: {error}")) from error
    return _symmetric_memory


def _refusal(why: str) -> str:
    return (
        "--moe-token-dispatcher-type symmetric needs the ranks of --expert-model-parallel-size "
        "on one node, whose GPUs can read each other's memory, and torch's symmetric memory: "
        f"{why}. Use allgather or alltoall."
    )


def _exchange(ep: Axis, device: torch.device) -> Exchange:
    return _peers(ep, device) if device.type == "cuda" else Gathered(ep)


@cache
def _peers(ep: Axis, device: torch.device) -> Peers:
    return Peers(ep, device)


class _ReadRows(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, exchange: Exchange, places: Places) -> Any:
        ctx.exchange, ctx.places = exchange, places
        return exchange.pull(x, probs, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_probs: Tensor) -> Any:
        return *ctx.exchange.add(grad, grad_probs, ctx.places), None, None


class _SumRows(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: Exchange, places: Places) -> Tensor:
        ctx.exchange, ctx.places = exchange, places
        return exchange.add(y, None, places)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.exchange.pull(grad, None, ctx.places)[0], None, None
