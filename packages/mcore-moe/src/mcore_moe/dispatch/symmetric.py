"""Dispatch and combine by reading the memory of the other GPUs of the node.

Each rank lays its tokens into a buffer that all ranks of ``ep`` can read. Each computes from
the choices of all ranks which rows its experts need, and copies these straight into the order
of its experts; the results are read and summed by the tokens' own ranks. Sizes follow from the
number of tokens alone and no number reaches the host. Fewer rows travel than in an all-gather
where a token has fewer choices than there are ranks. On a CPU the ranks gather the buffers
instead, which is the reference.
"""

import socket
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mcore_moe.config import MoEConfig
from mcore_moe.dispatch.permutation import RowPlan, plan_rows
from mcore_moe.dispatch.protocol import DEFAULT_OPTIONS, Dispatched, Dispatcher, DispatchOptions
from mcore_moe.routing.topk import Routing
from mcore_parallel.autograd_functions import OnceDifferentiable
from mcore_parallel.collectives import all_gather
from mcore_parallel.mesh import Axis


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows come from and where the results of this rank's tokens are."""

    sources: Int[Tensor, " R"]
    """Choice of each row of this rank, over the tokens of all ranks; -1: none."""
    owners: Int[Tensor, "T k"]
    """Rank of each choice of this rank's tokens; one behind the last: none."""
    rows: Int[Tensor, "T k"]
    """Row on that rank; outside of R: none."""
    offsets: Int[Tensor, " e1"]
    """Where the rows of this rank's experts begin, and the end of the last."""
    num_tokens: int
    """Of the rank that has most; the others' buffers end in tokens that are not read."""

    def part(self, begin: int, size: int) -> "Places":
        """Return those of ``size`` rows of each rank from ``begin`` on."""
        sources, offsets = self.sources[begin : begin + size], self.offsets
        offsets = offsets.clamp(begin, begin + size) - begin
        return replace(self, sources=sources, rows=self.rows - begin, offsets=offsets)

    def plan(self) -> RowPlan:
        """Return the plan of rows that lie in the order of their experts."""
        num_rows = self.sources.numel()
        row = torch.arange(num_rows, device=self.sources.device, dtype=torch.int32)
        slots = row.where(row < self.offsets[-1], num_rows)[:, None]
        return RowPlan(row, slots, self.offsets, False, True, True)


class Exchange(Protocol):
    """Reads what all ranks have."""

    def gather(self, ids: Int[Tensor, "T k"]) -> Int[Tensor, "M k"]:
        """Return the choices of all ranks, which bring equally many."""
        ...

    def pull(self, x: Tensor, probs: Tensor | None, places: Places) -> Any:
        """Return this rank's rows of the tokens of all ranks, and the weights of its rows.

        Both may hold anything behind the rows of the last expert: it is not read.
        """
        ...

    def add(self, y: Tensor, probs: Tensor | None, places: Places) -> Any:
        """Return the sums of this rank's tokens over rows of all ranks, and by choice."""
        ...


class SymmetricDispatcher(Dispatcher):
    """Reads rows from the ranks of their tokens, and results from those of their experts."""

    def __init__(
        self,
        config: MoEConfig,
        ep: Axis,
        make_exchange: Callable[[Axis, torch.device], Exchange] | None = None,
    ) -> None:
        """Keep the config and the axis; no communication.

        Args:
            config: of the layer.
            ep: ranks that share the experts, of one node.
            make_exchange: gives what reads the tensors of other ranks; None: their memory on
                GPUs, by buffers that all layers share, or gathers on CPUs.
        """
        self.config, self.ep = config, ep
        self.make_exchange = make_exchange or _exchange

    def dispatch(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        options: DispatchOptions = DEFAULT_OPTIONS,
    ) -> Dispatched:
        """Read as many rows as the worst routing gives; ``chunked`` reads them in parts."""
        return self.there(x, routing.probs, self.plan(routing, options))

    def combine(self, y: Float[Tensor, "R D"], handle: Places) -> Float[Tensor, "T D"]:
        """Read the rows of this rank's tokens and sum them by token."""
        return _Back.apply(y, self.exchange(y), handle)

    def there(
        self, x: Float[Tensor, "T D"], probs: Float[Tensor, "T k"], places: Places
    ) -> Dispatched:
        """Read rows and their weights where they are needed."""
        rows, weights = _There.apply(x, probs, self.exchange(x), places)
        return Dispatched(rows, weights[:, None], places.plan(), places)

    def plan(self, routing: Routing, options: DispatchOptions) -> Places:
        """Plan the rows of all ranks from their choices, as many as at worst.

        The host waits for the numbers of tokens unless all ranks bring equally many.
        """
        ids, rank, num_experts = routing.ids, self.ep.rank, self.config.num_experts
        num_local = num_experts // self.ep.size
        if routing.keep is not None:
            ids = ids.where(routing.keep, num_experts)
        own, topk = ids.shape
        size = own
        if not options.equal_tokens:
            sizes = all_gather(torch.tensor([own], device=ids.device), self.ep)
            size = int(sizes.max())
        size = max(1, size)
        padded = F.pad(ids, (0, 0, 0, size - own), value=num_experts)
        everyone = self.exchange(ids).gather(padded)
        plan = plan_rows(everyone, num_experts, everyone < num_experts)
        begins = plan.offsets[::num_local]  # of each rank, and the end of the last
        at = torch.arange(everyone.shape[0] * min(topk, num_local), device=ids.device)
        at = at + begins[rank]
        choices = F.pad(plan.choices, (0, 1))
        sources = choices[at.clamp(max=choices.numel() - 1)]
        mine = slice(rank * size, rank * size + own)
        owners = everyone[mine] // num_local
        rows = plan.slots[mine] - begins[owners]
        first = rank * num_local
        return Places(
            sources.where(at < begins[rank + 1], -1).int(),
            owners.int(),
            rows.where(owners < self.ep.size, -1).int(),
            (plan.offsets[first : first + num_local + 1] - begins[rank]).int(),
            size,
        )

    def exchange(self, x: Tensor) -> Exchange:
        """Return how ranks read each other's tensors of a device."""
        return self.make_exchange(self.ep, x.device)


class Gathered:
    """Reference of ``Peers`` in plain torch: every rank gathers what all have."""

    def __init__(self, ep: Axis) -> None:
        """Keep the axis."""
        self.ep = ep

    def gather(self, ids: Int[Tensor, "T k"]) -> Int[Tensor, "M k"]:
        """See ``Exchange``."""
        return all_gather(ids, self.ep)

    def pull(self, x: Tensor, probs: Tensor | None, places: Places) -> Any:
        """See ``Exchange``."""
        missing, topk = places.num_tokens - x.shape[0], places.owners.shape[1]
        source, is_empty = places.sources.clamp(min=0), places.sources < 0
        everyone = all_gather(F.pad(x, (0, 0, 0, missing)), self.ep)
        rows = everyone[source // topk].masked_fill(is_empty[:, None], 0)
        if probs is None:
            return rows, None
        weights = all_gather(F.pad(probs, (0, 0, 0, missing)), self.ep).flatten()
        return rows, weights[source].masked_fill(is_empty, 0)

    def add(self, y: Tensor, probs: Tensor | None, places: Places) -> Any:
        """See ``Exchange``."""
        owners, rows, num_rows = places.owners, places.rows, y.shape[0]
        found = (owners < self.ep.size) & (rows >= 0) & (rows < num_rows)
        at = (owners * num_rows + rows).where(found, 0)
        taken = all_gather(y, self.ep)[at].masked_fill(~found[..., None], 0)
        wide = torch.promote_types(y.dtype, torch.float32)
        sums = taken.sum(1, dtype=wide).to(y.dtype)  # [T, k, D] -> [T, D]
        if probs is None:
            return sums, None
        return sums, all_gather(probs, self.ep)[at].masked_fill(~found, 0)


class Peers:
    """Buffers of symmetric memory, shared by all layers, in which ranks read each other's rows.

    Every exchange writes its own buffer, meets the others at a barrier and reads theirs, in
    the order of one stream. What a rank reads in exchange n it has read before it arrives at
    the barrier of n+1. So a buffer may be written again once the barrier of any later exchange
    has been passed: all reads of it are over. Choices, rows and sums have buffers of their
    own, so that exchanges in turn need one barrier each; where two in a row use one buffer, or
    a CUDA graph begins or ends, which may follow anything, one barrier more comes before the
    write. All ranks exchange in the same order, so they agree where that is.

    torch numbers the connections of a process over all of its groups, and ranks wait for that
    number: ranks of different ``ep`` connect differently often where they bring different
    numbers of tokens, and hang if they then share symmetric memory by another group. Nothing
    else in these packages does.
    """

    def __init__(self, ep: Axis, device: torch.device, memory: Any = None) -> None:
        """Check that the ranks are of one node: they exchange a checksum of its name.

        Args:
            ep: the ranks.
            device: of this one.
            memory: what allocates and connects it; None: ``torch.distributed``'s.

        Raises:
            ValueError: on all ranks, if they are not, or torch has no symmetric memory.
        """
        by_device = "nccl" in torch.distributed.get_backend(ep.group)
        own = torch.tensor([crc32(socket.gethostname().encode())])
        num_nodes = all_gather(own.to(device if by_device else "cpu"), ep).unique().numel()
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
        """Lay tensors into the buffer, and wait on the device until all ranks have.

        With ``offsets`` of experts the rows of ``x`` behind the last of them are left out.

        Returns:
            The handle and the addresses of all ranks' buffers; where the second tensor begins.
        """
        row_bytes = x.shape[1] * x.element_size()
        offset = -(-num_rows * row_bytes // 16) * 16
        width = 0 if probs is None else probs.shape[1:].numel() * probs.element_size()
        buffer, handle, table = self._buffer(kind, offset + num_rows * width)
        now = (buffer.data_ptr(), self._is_recorded())
        if self.last is not None and (self.last[0] == now[0] or self.last[1] != now[1]):
            handle.barrier()
        self.last = now
        place = _place_of(x, buffer)
        if offsets is None:
            place.copy_(x)
        else:
            from mcore_moe.kernels.peer_rows import lay_rows

            lay_rows(place, x.contiguous(), offsets)
        if probs is not None:
            _place_of(probs, buffer[offset:]).copy_(probs)
        handle.barrier()
        return (handle, table), offset

    def _buffer(self, kind: str, num_bytes: int) -> tuple[Tensor, Any, Tensor]:
        """Return a buffer that is large enough; all ranks make a new one, or none.

        It is an eighth larger at most. Smaller ones stay: a CUDA graph may read them.
        """
        for entry in self.buffers[kind]:
            if entry[0].numel() >= num_bytes:
                return entry
        if self._is_recorded():
            raise RuntimeError("a step must run once before it is recorded.")
        step = 1 << max(4, num_bytes.bit_length() - 4)
        size = -(-num_bytes // step) * step
        try:
            buffer = self.memory.empty(size, dtype=torch.uint8, device=self.device)
            handle = self.memory.rendezvous(buffer, self.group)
        except RuntimeError as error:
            raise ValueError(_refusal(str(error))) from error
        peers = range(self.group.size())
        seen = [handle.get_remote_tensor(p, (size,), torch.uint8) for p in peers]
        table = torch.tensor([x.data_ptr() for x in seen], device=self.device)
        self.buffers[kind].append((buffer, handle, table))
        return self.buffers[kind][-1]

    def _is_recorded(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _place_of(x: Tensor, buffer: Tensor) -> Tensor:
    """Return the beginning of a buffer as a tensor like ``x``."""
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


class _There(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, exchange: Exchange, places: Places) -> Any:
        ctx.exchange, ctx.places = exchange, places
        return exchange.pull(x, probs, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_probs: Tensor) -> Any:
        return *ctx.exchange.add(grad, grad_probs, ctx.places), None, None


class _Back(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: Exchange, places: Places) -> Tensor:
        ctx.exchange, ctx.places = exchange, places
        return exchange.add(y, None, places)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.exchange.pull(grad, None, ctx.places)[0], None, None
