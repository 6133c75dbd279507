"""``GradientSync``: the interface of a data-parallel engine (buckets with ZeRO-1, or FSDP2).

An engine wraps the model chunks of a rank, sums their gradients over ranks, and lists in
``units`` the weights that this rank updates. The optimizer, checkpoints and comparisons of
replicas use engines only through this class; ``engines.ENGINES`` lists the engines.
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
    """The flat range of one parameter that this rank updates."""

    named: NamedParameter
    first: int
    """First element of the flattened parameter."""
    stop: int
    """One past the last element of the flattened parameter."""
    offset: int
    """Offset of the range in the flat tensors of the rank's part of the unit."""

    def view(self, owned: Shaped[Tensor, " n"]) -> Shaped[Tensor, " m"]:
        """Return the range's elements of a flat tensor over the rank's part of the unit."""
        return owned[self.offset : self.offset + self.stop - self.first]


class Copy(NamedTuple):
    """A tensor of weights that several ranks hold."""

    name: str
    axis: Axis
    """Ranks that hold the tensor; may be a single rank."""
    weights: Tensor
    stays_equal: bool
    """Whether every update keeps the copies equal to the last bit."""


@runtime_checkable
class OwnedUnit(Protocol):
    """Weights that an engine communicates together, and flat tensors of this rank's part.

    The flat tensors keep their memory from step to step. They hold the parameters in the order
    of ``members``; padding between parameters is zero and stays zero.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights in the model."""

    @property
    def is_narrow(self) -> bool:
        """Whether weights are all-gathered in fp8, and so have fewer bits than their dtype."""

    @property
    def members(self) -> Sequence[NamedParameter]:
        """Parameters of the unit, also those that belong to other ranks only."""

    def owned_ranges(self) -> list[OwnedRange]:
        """List the ranges of the parameters that this rank owns, in memory order."""

    def own_weights(self) -> Shaped[Tensor, " n"]:
        """Return the weights, in the model's dtype."""

    def own_main(self) -> Shaped[Tensor, " n"] | None:
        """Return main weights that the engine keeps; None: the optimizer allocates them."""

    def own_grads(self) -> Shaped[Tensor, " n"]:
        """Return the gradients, valid after ``finish``."""

    def copies(self) -> Iterable[Copy]:
        """Return the weights that several ranks hold, in forward order."""


FlatPart = tuple[OwnedUnit, int, Tensor]
"""A unit, an offset in this rank's part of it, and a flat tensor that begins at the offset."""


def clip_ranges(ranges: Iterable[OwnedRange], begin: int, stop: int) -> Iterator[OwnedRange]:
    """Clip ranges to elements [begin, stop) of this rank's part; count offsets from begin."""
    for owned in ranges:
        first = max(begin, owned.offset)
        last = min(stop, owned.offset + owned.stop - owned.first)
        if first < last:
            shift = owned.first - owned.offset  # from the rank's part to the parameter
            yield OwnedRange(owned.named, first + shift, last + shift, first - begin)


class GradientSync(ABC):
    """A data-parallel engine of all model chunks of this rank.

    Order of a step: ``zero_grad``; forwards and backwards, all inside ``no_sync`` except the
    last of each chunk; ``finish``; then the optimizer updates each unit of ``gathering``.

    Attributes:
        ctx: the context whose data axes gradients are summed over.
        config: the options that the engine was built with.
        keeps_weights: whether a weight keeps its address from step to step, so that casts of
            weights can be cached by address.
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
        """Reset all gradients before the first micro-batch of a step; no communication."""

    @abstractmethod
    def finish(self) -> None:
        """Complete all gradient sums; every rank calls it once after the last backward.

        Sums partial gradients over tensor ranks, tied copies over stages, and all gradients
        over data and context ranks.
        """

    @abstractmethod
    def weight_shards(self) -> dict[str, Shard]:
        """Return shards of this rank's weights, in the model's dtype, by logical name.

        The views stay valid, and are up to date after ``wait_params``. Write to them only to
        load weights, then call ``DistributedOptimizer.refresh``.
        """

    @abstractmethod
    def check_weights(self) -> None:
        """Compare replicas of weights bit for bit; every rank calls it between steps.

        Raises:
            UnlikeWeightsError: on every rank if any differ, with parameter and ranks.
        """

    def fill_weights(self, fill: Callable[[Mapping[str, Shard]], None]) -> None:
        """Set the initial weights by a function; call it before the optimizer is built.

        No communication: the function must set equal values on ranks that hold equal boxes.

        Args:
            fill: sets the shards that it gets by logical name, in the model's dtype. It may be
                called several times, once for each tensor.
        """
        fill(self.weight_shards())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without sums over data ranks, within the ``with`` block."""
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
        """All-gather in the model's dtype the weights that ``gathering`` sends in fp8."""

    def wait_params(self) -> None:  # noqa: B027 - an engine may have nothing in flight
        """Bring ``weight_shards`` up to date: before a save, a comparison or an export."""

    def remove_hooks(self) -> None:  # noqa: B027 - an engine may have none
        """Remove the engine's hooks from the parameters: backward fills ``.grad`` again."""

    def grad_shards(self) -> dict[str, Shard]:
        """Return shards of the gradients that this rank owns; call it after ``finish``."""
        return self.owned_shards([(unit, 0, unit.own_grads()) for unit in self.units])

    def owned_shards(self, flats: Iterable[FlatPart]) -> dict[str, Shard]:
        """Return shards of flat tensors with the layout of (parts of) this rank's units."""
        ranges = [
            (owned.named, owned.first, owned.stop, owned.view(flat))
            for unit, begin, flat in flats
            for owned in clip_ranges(unit.owned_ranges(), begin, begin + flat.numel())
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
