"""Estimates the gradient noise of a step from norms of gradients that the step computes.

A step adds up N parts of its batch: the micro-batches of all data ranks. The mean square of a
part's gradient exceeds the square of the whole gradient by the noise. So two norms give noise
and signal without another backward: the norm of one part on each rank, taken before the next
part is added or ranks sum, and the norm of the sum.

With G_big the gradient of the batch and G_small the gradient of a part, both as means over
their samples, and the batch as the unit of size, two estimates are unbiased:
    ``|G|^2 = (N |G_big|^2 - |G_small|^2) / (N - 1)``
    ``tr(S) / B = (|G_small|^2 - |G_big|^2) / (N - 1)``
Their ratio is the noise scale over the batch size: above 1 a step's gradient is more noise than
signal.

Reference:
    McCandlish et al. 2018, An Empirical Model of Large-Batch Training, appendix A.1.
    arXiv:1812.06162.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.data_parallel.buckets import Bucket
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.sharding import NamedParameter, held_share

if TYPE_CHECKING:  # it imports DTensors, which other programs start without
    from mcore_parallel.data_parallel.fully_sharded import FullyShardedDataParallel


@dataclass(frozen=True, slots=True)
class NoiseSquares:
    """Squares of gradients that one rank holds in a step; sums over the world give norms."""

    part: Float[Tensor, ""]
    """Square of this rank's gradient of one part, over the number of data ranks."""
    whole: Float[Tensor, ""]
    """Square of the range of the summed gradient that this rank owns."""
    num_parts: int
    """Parts of the batch over all data ranks."""


def noise_and_signal(part: float, whole: float, num_parts: int) -> tuple[float, float]:
    """Return tr(S) / B and |G|^2 from sums of ``NoiseSquares`` over the world.

    Args:
        part: mean square of the gradient of one part, as it enters the sum.
        whole: square of the sum.
        num_parts: parts of the batch, at least 2.
    """
    small = num_parts**2 * part  # a part's own mean: the sum weighs it by 1 / N
    return (small - whole) / (num_parts - 1), (num_parts * whole - small) / (num_parts - 1)


class GradientNoise:
    """Computes the two norms of a step over the dense weights of one ``DataParallel``.

    Experts, which get tokens of other ranks, and buckets that need sums over other axes (norms
    under sequence parallelism, tied embeddings) are not measured: no rank ever holds their
    gradient of one part.
    """

    def __init__(self, data_parallel: DataParallel) -> None:
        self._data_parallel = data_parallel
        dense = [b for b in data_parallel.buckets if b.kind == "dense" and not b.is_late]
        # A slot that adds several micro-batches at once never holds the gradient of one.
        self._buckets = [
            bucket
            for bucket in dense
            if all(grad_slot(s.named.parameter).num_together == 1 for s in bucket.slots)
        ]
        self._parts: list[Tensor] = []
        self._num_microbatches = 0

    def start(self, num_microbatches: int) -> Callable[[int], None] | None:
        """Measure the next step.

        Args:
            num_microbatches: micro-batches of each data rank in the step.

        Returns:
            A callback to call with a chunk's number when the gradients of its first micro-batch
            are complete; None: no call is needed.
        """
        self._parts, self._num_microbatches = [], num_microbatches
        if num_microbatches > 1:
            return self._after_first
        self._data_parallel.before_sum = self._before_sum
        return None

    def end(self) -> None:
        """Stop measuring: no gradient is read until the next ``start``."""
        self._data_parallel.before_sum = None

    def take(self) -> NoiseSquares | None:
        """Return the squares of the last measured step; None if its batch has only one part.

        Call it after ``finish``. A CUDA graph that was captured while a step was measured
        updates the squares of parts in each replay.
        """
        data = self._data_parallel.ctx.dp_cp
        num_parts = self._num_microbatches * data.size
        if num_parts < 2 or not self._parts:
            return None
        whole = torch.zeros((), device=self._data_parallel.ctx.device, dtype=torch.float64)
        for bucket in self._buckets:
            # Replica ranks hold the same sum, which the sum over the world counts repeatedly.
            copies = bucket.replica.size
            owned = [(o.named, o.view(bucket.own_grads())) for o in bucket.owned_ranges()]
            whole += _squares(owned) / copies
        part = torch.stack(self._parts).sum() / data.size
        return NoiseSquares(part, whole, num_parts)

    def _after_first(self, chunk: int) -> None:
        for bucket in self._buckets:
            self._add(bucket, chunk)

    def _before_sum(self, bucket: Bucket) -> None:
        if bucket in self._buckets:
            self._add(bucket)

    def _add(self, bucket: Bucket, chunk: int = -1) -> None:
        slots = [s for s in bucket.slots if chunk in (-1, s.chunk)]
        # A stale slot still holds the last step's gradient: its weight got none in this part.
        fresh = [s for s in slots if not grad_slot(s.named.parameter).is_stale]
        if fresh:
            self._parts.append(_squares([(s.named, bucket.main_grad(s)) for s in fresh]))


class ShardedGradientNoise:
    """Computes the two norms of a step over dense weights that are fully sharded.

    ``fully_shard`` reduce-scatters in the backward of each micro-batch, so a part is one
    micro-batch of all data ranks. Leaves out experts, and weights whose gradients ``finish``
    sums over further axes.
    """

    def __init__(self, data_parallel: "FullyShardedDataParallel") -> None:
        """Find the gradients of an engine, whose data ranks must be one optimizer instance."""
        self._device = data_parallel.ctx.device
        self._rows: list[list[tuple[NamedParameter, Tensor]]] = []
        for chunk in data_parallel.chunks:
            in_chunk = {id(parameter) for parameter in chunk.parameters()}
            units = [unit for unit in data_parallel.sharded if id(unit.parameter) in in_chunk]
            self._rows.append(
                [(unit.named, unit.grads) for unit in units if _is_complete(unit.named)]
            )
        self._parts: list[Tensor] = []
        self._num_microbatches = 0

    def start(self, num_microbatches: int) -> Callable[[int], None] | None:
        """Measure the next step, as ``GradientNoise.start``."""
        self._parts, self._num_microbatches = [], num_microbatches
        return self._after_first if num_microbatches > 1 else None

    def end(self) -> None:
        """Do nothing: only the callback of ``start`` and ``take`` read gradients."""

    def take(self) -> NoiseSquares | None:
        """Return the squares of the last measured step; None if it had one micro-batch."""
        if not self._parts:
            return None
        whole = torch.zeros((), device=self._device, dtype=torch.float64)
        for rows in self._rows:
            whole += _squares(rows)
        return NoiseSquares(torch.stack(self._parts).sum(), whole, self._num_microbatches)

    def _after_first(self, chunk: int) -> None:
        self._parts.append(_squares(self._rows[chunk]).to(self._device))


def _is_complete(named: NamedParameter) -> bool:
    """Return whether a gradient is dense and summed over data ranks only."""
    layout = named.layout
    partial_sizes = [part.partial.size for part in layout.parts]
    return layout.data == "dense" and max([layout.tied.size, *partial_sizes]) == 1


def _squares(gradients: Sequence[tuple[NamedParameter, Tensor]]) -> Float[Tensor, ""]:
    """Sum the squares of gradients; elements that several tensor ranks hold count once."""
    by_share: dict[float, list[Tensor]] = defaultdict(list)
    for named, gradient in gradients:
        if gradient.numel():
            by_share[held_share(named.layout)].append(gradient)
    total = torch.zeros((), dtype=torch.float64)
    # Shares are Python numbers: a host tensor could not be copied inside a CUDA graph.
    for share, views in by_share.items():
        wide = torch.promote_types(views[0].dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(views, 2.0, dtype=wide)).double()
        total = norms.square().sum() * share + total
    return total
