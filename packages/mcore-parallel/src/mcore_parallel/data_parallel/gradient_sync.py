"""``GradientSync``: who owns the weights and gradients of model chunks on the data ranks.

An engine wraps the chunks, sums their gradients over ranks, and lists in ``units`` the weights
that this rank updates. The optimizer, checkpoints and checks of replicas use engines through
this class alone; ``engines.ENGINES`` has one entry for each.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor

from mcore_parallel.config import DataParallelConfig
from mcore_parallel.mesh import Axis, ParallelContext
from mcore_parallel.sharding import NamedParameter, Shard, flat_shards


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """What of one parameter this rank updates."""

    named: NamedParameter
    first: int
    """First element of the flattened parameter."""
    stop: int
    """One past the last element of the flattened parameter."""
    offset: int
    """Where it begins in what the rank owns of the unit."""

    def view(self, owned: Shaped[Tensor, " n"]) -> Shaped[Tensor, " m"]:
        """Return its memory in a flat tensor over the rank's part of the unit."""
        return owned[self.offset : self.offset + self.stop - self.first]


class Copy(NamedTuple):
    """A tensor of weights that other ranks hold too."""

    name: str
    axis: Axis
    """Ranks that hold it; may be one rank alone."""
    weights: Tensor
    stays_equal: bool
    """Whether every update keeps the copies equal to the last bit."""


@runtime_checkable
class OwnedUnit(Protocol):
    """Weights that are updated together; flat tensors of what this rank owns of them.

    Tensors are the same memory in every step. Parameters lie in the order of ``members``, with
    zeros between them that stay zeros.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights in the model."""

    @property
    def is_narrow(self) -> bool:
        """Whether the model's weights hold less than main weights rounded to their dtype."""

    @property
    def members(self) -> Sequence[NamedParameter]:
        """Parameters of the unit, also those of which this rank owns nothing."""

    def owned_ranges(self) -> list[OwnedRange]:
        """List what of each parameter this rank owns, in memory order."""

    def own_weights(self) -> Shaped[Tensor, " n"]:
        """Return the weights, in the model's dtype."""

    def own_main(self) -> Shaped[Tensor, " n"] | None:
        """Return main weights that the engine keeps; None: the optimizer makes its own."""

    def own_grads(self) -> Shaped[Tensor, " n"]:
        """Return the gradients, meaningful after ``finish``."""

    def copies(self) -> Iterable[Copy]:
        """List the weights that other ranks hold too, in forward order."""


FlatPart = tuple[OwnedUnit, int, Tensor]
"""A unit, the offset in this rank's shard, and a flat tensor with the layout from there on."""


def clipped(ranges: Iterable[OwnedRange], begin: int, stop: int) -> Iterator[OwnedRange]:
    """Cut ranges to elements [begin, stop) of what the rank owns, counted from ``begin``."""
    for owned in ranges:
        first = max(begin, owned.offset)
        last = min(stop, owned.offset + owned.stop - owned.first)
        if first < last:
            moved = owned.first - owned.offset
            yield OwnedRange(owned.named, first + moved, last + moved, first - begin)


class GradientSync(ABC):
    """A data-parallel engine: one for the chunks of this rank.

    A step: ``zero_grad``; forwards and backwards, of which all but a chunk's last run inside
    ``no_sync``; ``finish``; then the optimizer updates each unit of ``gathering``.

    Attributes:
        ctx: the context whose data axes it sums over.
        config: the switches it was built with.
        keeps_weights: whether a weight has one place in memory from step to step, so that what
            is made of it, such as a cast, can be kept by its address.
    """

    ctx: ParallelContext
    config: DataParallelConfig
    keeps_weights: bool = True

    @property
    @abstractmethod
    def units(self) -> Sequence[OwnedUnit]:
        """Units in the order in which backward completes them."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether gradients are complete: ``finish`` ran and nothing was added since."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget all gradients and expect the first micro-batch; no communication."""

    @abstractmethod
    def finish(self) -> None:
        """Complete all sums; every rank calls it once after the last backward.

        Sums over the ranks that hold parts of a gradient, over tied copies and over data.
        """

    @abstractmethod
    def weight_shards(self) -> dict[str, Shard]:
        """Describe the model's weights on this rank, in the model's dtype, by logical name.

        The views stay valid, and are current after ``wait_params``. Write to them only when
        loading, then call ``DistributedOptimizer.refresh``.
        """

    @abstractmethod
    def check_weights(self) -> None:
        """Compare the weights of ranks that hold the same; every rank calls it between steps.

        Raises:
            UnlikeWeightsError: on every rank if any differ, with parameter and ranks.
        """

    def fill_weights(self, fill: Callable[[Mapping[str, Shard]], None]) -> None:
        """Let a function set what weights begin as, before an optimizer is made.

        No communication: ranks that hold the same are to set the same.

        Args:
            fill: called with what this rank holds, by logical name, in the model's dtype; once
                or several times, each tensor once.
        """
        fill(self.weight_shards())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate inside: for every micro-batch but the last."""
        yield

    def start_sync(self, chunk: int) -> None:  # noqa: B027 - an engine may sum in finish alone
        """Mark the next backward of a chunk as its last, so that its sums may start.

        Called inside ``no_sync``.
        """

    def start_weight_sync(self, chunk: int) -> None:  # noqa: B027
        """Mark the next deferred weight gradients of a chunk as its last."""

    @property
    def update_order(self) -> Sequence[OwnedUnit]:
        """Units in the order of ``gathering``."""
        return self.units

    def gathering(self) -> Iterator[OwnedUnit]:
        """Yield each unit for its update, then all-gather its updated weights."""
        yield from self.update_order

    def gather_params(self) -> None:
        """All-gather weights that their owners have changed; see ``gathering``."""
        for _ in self.gathering():
            pass

    def gather_in_full(self) -> None:  # noqa: B027 - most units are never narrow
        """Make all bits of narrow units' weights known; their owners have set them."""

    def wait_params(self) -> None:  # noqa: B027 - an engine may have nothing on its way
        """Make ``weight_shards`` current: before a save, a comparison, an export."""

    def remove_hooks(self) -> None:  # noqa: B027 - an engine may have none
        """Give the parameters back: backward fills ``.grad`` again."""

    def grad_shards(self) -> dict[str, Shard]:
        """Describe the gradients that this rank validly holds after ``finish``; views."""
        return self.owned_shards([(unit, 0, unit.own_grads()) for unit in self.units])

    def owned_shards(self, flats: Iterable[FlatPart]) -> dict[str, Shard]:
        """Describe tensors that lie like parts of what this rank owns of the units."""
        ranges = [
            (owned.named, owned.first, owned.stop, owned.view(flat))
            for unit, begin, flat in flats
            for owned in clipped(unit.owned_ranges(), begin, begin + flat.numel())
        ]
        return flat_shards(ranges, self.replica_axes())

    def replica_axes(self) -> dict[str, Axis]:
        """Return the data ranks that own the same ranges, by ``ParamLayout.data`` kind."""
        if self.config.sharding == "no_shard":
            return self.ctx.data_axes()
        return {
            "dense": self.ctx.optimizer_replica,
            "expert": self.ctx.expert_optimizer_replica,
        }
