"""Contiguous memory for weights and main gradients, cut into buckets in backward order.

Parameters are put into buckets in reverse registration order, the order in which backward
completes them; a bucket is the unit of communication. ``plan_buckets`` computes the offsets as
plain numbers; ``Bucket`` allocates the memory and calls the two collectives. Parameter buffer
and gradient buffer have equal offsets, so the distributed optimizer gathers updated weights
directly into the parameters.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel.gradient_sync import Copy, OwnedRange
from mcore_parallel.kernels.fp8_cast import cast_flat, dequantize_flat, largest_magnitude
from mcore_parallel.launch.call_checks import agree
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.precision.fp8 import FORWARD_DTYPE, Fp8Gemm
from mcore_parallel.precision.fp8_recipes import Tensorwise
from mcore_parallel.sharding import NamedParameter

ALIGNMENT = 64
"""Alignment of a parameter's start, in elements."""

END_MULTIPLE = 128
"""A bucket's size is a multiple of this number of elements, and of the number of data ranks."""

HIGH_BUSBW_MULTIPLE = 65536
"""Replaces ``END_MULTIPLE`` under ``--ddp-pad-buckets-for-high-nccl-busbw``."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Offsets of the tensors of one bucket, in elements."""

    members: tuple[int, ...]
    """Indices of the tensors, in memory order."""
    starts: tuple[int, ...]
    """First element of each tensor."""
    size: int
    """Number of elements, including padding between tensors and at the end."""


def plan_buckets(
    sizes: Sequence[int], *, bucket_size: int, end_multiple: int = END_MULTIPLE
) -> list[BucketPlan]:
    """Assign tensors to buckets in their order, and return the plan of each bucket.

    Args:
        sizes: elements of each tensor.
        bucket_size: number of elements at which a bucket is closed; 0: one bucket.
        end_multiple: bucket sizes are rounded up to a multiple of this number.
    """
    plans: list[BucketPlan] = []
    members: list[int] = []
    starts: list[int] = []
    end = 0
    for index, size in enumerate(sizes):
        members.append(index)
        starts.append(_round_up(end, ALIGNMENT))  # the gap before it stays zero
        end = starts[-1] + size
        if (bucket_size and end >= bucket_size) or index == len(sizes) - 1:
            plans.append(
                BucketPlan(tuple(members), tuple(starts), _round_up(end, end_multiple))
            )
            members, starts, end = [], [], 0
    return plans


def shard_ranges(size: int, count: int) -> tuple[tuple[int, int], ...]:
    """Split a bucket into ``count`` equal ranges (first, one past last), one for each rank."""
    if size % count:
        raise ValueError(
            f"a bucket of {size} elements cannot be split evenly over {count} ranks: pad it to "
            f"a multiple of {count}"
        )
    length = size // count
    return tuple((i * length, (i + 1) * length) for i in range(count))


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter and its offset in its bucket."""

    named: NamedParameter
    chunk: int
    """Model chunk that holds the parameter."""
    start: int
    """First element in the bucket."""

    @property
    def stop(self) -> int:
        """One past the parameter's last element in the bucket."""
        return self.start + self.named.parameter.numel()


class Bucket:
    """Weights and main gradients that are communicated together.

    Attributes:
        slots: parameters in memory order.
        params: all weights, flat, ``[size]``; the parameters are views of it.
        grads: all main gradients, flat, ``[size]``; each ``GradSlot.main`` is a view of it.
        shard: ranks that each own one range of the bucket; an axis of one rank if this rank
            owns the whole bucket.
        replica: ranks that own the same range; gradients are summed over both axes.
        data: product of ``shard`` and ``replica``: the ranks that hold equal weights.
        kind: kind of the data ranks, ``dense`` or ``expert``.
        is_late: whether the gradients need sums over other axes before the data sum.
        is_narrow: whether the weights are gathered in fp8, see ``Fp8Gather``.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        size: int,
        grad_dtype: torch.dtype,
        shard: Axis,
        replica: Axis,
        data: Axis,
        scales: Axis | None = None,
    ) -> None:
        """Move the parameters into the bucket; their ``data`` is replaced by views of it."""
        first = slots[0].named.parameter
        self.slots = tuple(slots)
        self.size = size
        self.shard, self.replica, self.data = shard, replica, data
        self.kind = slots[0].named.layout.data
        self.is_late = _extra_sum_kind(slots[0].named) != ""
        self.is_narrow, self._scales = scales is not None, scales
        self.ranges = shard_ranges(size, shard.size)
        self.params = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(size, dtype=grad_dtype, device=first.device)
        self.is_reducing = False
        self._work: dist.Work | None = None
        for slot in self.slots:
            parameter = slot.named.parameter
            # The parameter object stays, and its memory is now a view of the bucket: an
            # all-gather into the bucket updates all parameters, and a GEMM adds to ``grads``.
            view = self.params[slot.start : slot.stop].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            grad_slot(parameter).main = self.main_grad(slot)

    def main_grad(self, slot: Slot) -> Shaped[Tensor, "..."]:
        """Return the view of ``grads`` that is a parameter's main gradient."""
        return self.grads[slot.start : slot.stop].view(slot.named.parameter.shape)

    def owned(self, flat: Shaped[Tensor, " size"]) -> Shaped[Tensor, " n"]:
        """Return this rank's range of ``params``, ``grads`` or a tensor of the same layout."""
        start, stop = self.ranges[self.shard.rank]
        return flat[start:stop]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.params.dtype

    @property
    def members(self) -> list[NamedParameter]:
        """Parameters in memory order."""
        return [slot.named for slot in self.slots]

    def own_weights(self) -> Shaped[Tensor, " n"]:
        """Return this rank's range of the weights."""
        return self.owned(self.params)

    def own_main(self) -> None:
        """Return None: the optimizer keeps the main weights."""
        return

    def own_grads(self) -> Shaped[Tensor, " n"]:
        """Return this rank's range of the main gradients."""
        return self.owned(self.grads)

    def copies(self) -> Iterator[Copy]:
        """Yield every weight for data ranks and tied stages, and its replicated parts."""
        for slot in reversed(self.slots):
            named, weight = slot.named, slot.named.parameter.detach()
            yield Copy(named.name, self.data, weight, True)
            yield Copy(named.name, named.layout.tied, weight, True)
            for part in named.layout.parts:
                yield Copy(named.name, part.replicas, part.view(weight), False)

    def owned_ranges(self) -> list[OwnedRange]:
        """List the ranges of the parameters that this rank owns, in memory order."""
        start, stop = self.ranges[self.shard.rank]
        ranges = []
        for slot in self.slots:
            # Overlap of the parameter and this rank's range, in elements of the bucket. An
            # OwnedRange counts from the parameter's start, its offset from the range's start.
            first, last = max(start, slot.start), min(stop, slot.stop)
            if first < last:
                ranges.append(
                    OwnedRange(slot.named, first - slot.start, last - slot.start, first - start)
                )
        return ranges

    def start_reduction(self) -> None:
        """Launch the sum of the gradients over the data ranks, in place; returns at once.

        Reduce-scatter over ``shard``, or all-reduce over ``replica``. Afterwards only this
        rank's range of ``grads`` is valid.
        """
        self.is_reducing = True
        if self.shard.size > 1:
            agree(self.shard.agreement, "reduce_scatter of gradients", self.grads)
            # In place: the output is this rank's range of the input.
            self._work = dist.reduce_scatter_tensor(
                self.owned(self.grads), self.grads, group=self.shard.group, async_op=True
            )
        elif self.replica.size > 1:
            agree(self.replica.agreement, "all_reduce of gradients", self.grads)
            self._work = dist.all_reduce(self.grads, group=self.replica.group, async_op=True)

    def finish_reduction(self) -> None:
        """Wait for the sum; with both axes, all-reduce this rank's range over ``replica``."""
        if self._work is not None:
            with self.data.waiting():
                self._work.wait()
            self._work = None
        # Hybrid sharding: sum this rank's range over the ranks that own the same range.
        if self.shard.size > 1 and self.replica.size > 1:
            agree(self.replica.agreement, "all_reduce of gradients", self.owned(self.grads))
            with self.replica.waiting():
                dist.all_reduce(self.owned(self.grads), group=self.replica.group)

    def gather_params(
        self, async_op: bool = False, *, in_full: bool = False
    ) -> "PendingGather | None":
        """All-gather the ranges of all ranks into ``params``, in place.

        Args:
            async_op: return the pending gather instead of waiting for it.
            in_full: gather in the weights' dtype, even if ``is_narrow``.
        """
        if self._scales is not None and not in_full:
            gather = Fp8Gather(self, self._scales, async_op=async_op)
            if async_op:
                return gather
            gather.wait()
            return None
        if self.shard.size == 1:
            return None
        agree(self.shard.agreement, "all_gather of weights", self.params)
        return dist.all_gather_into_tensor(
            self.params, self.owned(self.params), group=self.shard.group, async_op=async_op
        )


class Fp8Gather:
    """All-gather of a bucket's weights in fp8; ``wait`` writes the weights.

    A linear with ``--fp8-recipe tensorwise`` casts its weight with one scale for the logical
    tensor. Here the owner of a range casts the range with that scale before the gather, and
    every rank dequantizes the fp8 numbers into the model's 16-bit weights. The GEMM's cast of
    these weights gives the same numbers and the same scale again, so results do not change and
    half as many bytes are sent. Main weights are not rounded, so that small updates add up.
    """

    def __init__(self, bucket: Bucket, axis: Axis, *, async_op: bool) -> None:
        """Cast this rank's range and launch the gather; waits for the largest magnitudes.

        Args:
            bucket: a bucket whose weights are all cast in their GEMMs.
            axis: ranks that hold parts or copies of the same logical weights.
            async_op: return before the gather has finished.
        """
        self._bucket = bucket
        weights, ranges = bucket.own_weights(), bucket.owned_ranges()
        indices = {slot.named.parameter: i for i, slot in enumerate(bucket.slots)}
        wide = torch.promote_types(weights.dtype, torch.float32)
        # One largest magnitude for each parameter. Ranks that own no part of a parameter
        # contribute 0, so the maximum over ``axis`` is that of the whole logical tensor.
        amax = torch.zeros(len(indices), dtype=wide, device=weights.device)
        for owned in ranges:
            index = indices[owned.named.parameter]
            amax[index : index + 1] = largest_magnitude(owned.view(weights)[None])
        self._amax = all_reduce(amax, axis, "max")
        self._wire = torch.zeros(bucket.size, dtype=torch.uint8, device=weights.device)
        own_wire = bucket.owned(self._wire)  # a view: the gather sends it in place
        for owned in ranges:
            amax = self._of(indices[owned.named.parameter])
            cast_flat(owned.view(weights), amax, owned.view(own_wire).view(FORWARD_DTYPE))
        agree(bucket.shard.agreement, "all_gather of weights in fp8", self._wire)
        self._work = dist.all_gather_into_tensor(
            self._wire, own_wire, group=bucket.shard.group, async_op=async_op
        )

    def wait(self) -> None:
        """Wait for the gather and write the dequantized weights into the bucket."""
        if self._work is not None:
            self._work.wait()
        for index, slot in enumerate(self._bucket.slots):
            numbers = self._wire[slot.start : slot.stop].view(FORWARD_DTYPE)
            dequantize_flat(
                numbers, self._of(index), self._bucket.params[slot.start : slot.stop]
            )

    def _of(self, index: int) -> Shaped[Tensor, " 1"]:
        return self._amax[index : index + 1]


PendingGather = dist.Work | Fp8Gather
"""An all-gather in flight; call ``wait`` before the weights are read."""


def build_buckets(
    parameters: Sequence[tuple[int, NamedParameter]],
    ctx: ParallelContext,
    config: DataParallelConfig,
    narrow: Collection[nn.Parameter] = (),
) -> list[Bucket]:
    """Put every parameter into a bucket; return equal buckets on all data ranks.

    The parameters of a bucket have one dtype, one kind of data ranks, and gradients that are
    either all summed over data as soon as backward has computed them, or all late (partial
    sums, tied copies). Tied copies have separate buckets, so that both stages sum them over
    data in the same order and the copies stay equal to the last bit.

    Args:
        parameters: number of the model chunk and parameter, in registration order.
        ctx: context with the data axes.
        config: bucket size, sharding, gradient dtype.
        narrow: weights to gather in fp8, in separate buckets; no effect if one rank owns a
            whole bucket, since nothing is gathered.

    Returns:
        Buckets in the order in which backward completes them, late ones last.
    """
    groups: dict[tuple, list[tuple[int, int, NamedParameter]]] = {}
    for order, (chunk, named) in enumerate(reversed(parameters)):
        is_narrow = named.parameter in narrow
        key = (named.parameter.dtype, named.layout.data, _extra_sum_kind(named), is_narrow)
        groups.setdefault(key, []).append((order, chunk, named))
    built: list[tuple[tuple[bool, int], Bucket]] = []
    for (dtype, kind, _, is_narrow), members in groups.items():
        data = ctx.data_axes()[kind]
        plans = plan_buckets(
            [named.parameter.numel() for _, _, named in members],
            bucket_size=_bucket_size(config, data),
            end_multiple=lcm(
                data.size,
                HIGH_BUSBW_MULTIPLE
                if config.ddp_pad_buckets_for_high_nccl_busbw
                else END_MULTIPLE,
            ),
        )
        shard, replica = _owners(ctx, kind, data, config)
        grad_dtype = (
            dtype if config.has_narrow_grads else torch.promote_types(dtype, torch.float32)
        )
        for plan in plans:
            slots = [
                Slot(members[i][2], members[i][1], start)
                for i, start in zip(plan.members, plan.starts, strict=True)
            ]
            is_sent = is_narrow and shard.size > 1
            scales = ctx.axis("tp", "cp", "dp") if is_sent else None
            bucket = Bucket(slots, plan.size, grad_dtype, shard, replica, data, scales)
            last = max(members[i][0] for i in plan.members)
            built.append(((bucket.is_late, last), bucket))
    return [bucket for _, bucket in sorted(built, key=lambda entry: entry[0])]


def fp8_weights(chunks: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the weights that tensorwise fp8 GEMMs cast by the weights' largest magnitudes."""
    weights = set()
    for module in (module for chunk in chunks for module in chunk.modules()):
        gemm = getattr(module, "gemm", None)
        if isinstance(gemm, Fp8Gemm) and type(gemm.recipe) is Tensorwise:
            weight = module.weight
            assert isinstance(weight, nn.Parameter)
            weights.add(weight)
    return weights


def _extra_sum_kind(named: NamedParameter) -> str:
    if named.layout.tied.size > 1:
        return "tied"
    return "partial" if any(p.partial.size > 1 for p in named.layout.parts) else ""


def _owners(
    ctx: ParallelContext, kind: str, data: Axis, config: DataParallelConfig
) -> tuple[Axis, Axis]:
    if config.sharding == "no_shard":
        return SINGLE, data
    if kind == "expert":
        return ctx.expert_optimizer_shard, ctx.expert_optimizer_replica
    return ctx.optimizer_shard, ctx.optimizer_replica


def _bucket_size(config: DataParallelConfig, data: Axis) -> int:
    if config.ddp_bucket_size:
        return config.ddp_bucket_size
    if config.overlap_grad_reduce or config.overlap_param_gather:
        return max(40_000_000, 1_000_000 * data.size)
    return 0


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
