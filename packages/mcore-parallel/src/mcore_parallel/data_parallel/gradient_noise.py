"""Gradient noise of a step, from norms of gradients that the step has anyway.

A step adds up N parts of its batch: micro-batches, and those of other data ranks. The mean
square of a part's gradient exceeds that of the whole by the noise, so two norms give both the
noise and the signal without another backward: that of one part on each rank, taken before the
next part is added or ranks sum, and that of the sum.

With G_big the gradient of the batch and G_small that of a part, both as means over their
samples, and the batch as the unit of size, two estimates are unbiased:
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

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.data_parallel.buckets import Bucket
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.sharding import NamedParameter, held_share


@dataclass(frozen=True, slots=True)
class NoiseSquares:
    """What one rank saw of a step; sums over the world give the norms."""

    part: Float[Tensor, ""]
    """Square of this rank's gradient of one part, over the number of data ranks."""
    whole: Float[Tensor, ""]
    """Square of what this rank owns of the summed gradient."""
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
    """Takes the two norms of a step, over the dense weights of one ``DataParallel``.

    Left out are experts, which other ranks send tokens to, and buckets that wait for sums over
    other axes (norms under sequence parallelism, tied embeddings): a rank never holds their
    gradient of one part.
    """

    def __init__(self, data_parallel: DataParallel) -> None:
        self._data_parallel = data_parallel
        dense = [b for b in data_parallel.buckets if b.kind == "dense" and not b.is_late]
        # Slots that add several micro-batches at once hold none of them alone.
        self._buckets = [
            bucket
            for bucket in dense
            if all(grad_slot(s.named.parameter).num_together == 1 for s in bucket.slots)
        ]
        self._parts: list[Tensor] = []
        self._num_microbatches = 0

    def start(self, num_microbatches: int) -> Callable[[int], None] | None:
        """Measure the step that comes.

        Args:
            num_microbatches: of each data rank in the step.

        Returns:
            What is to be called with a chunk once its first micro-batch has gradients; None:
            nothing.
        """
        self._parts, self._num_microbatches = [], num_microbatches
        if num_microbatches > 1:
            return self._after_first
        self._data_parallel.before_sum = self._before_sum
        return None

    def end(self) -> None:
        """Read no more gradients of this step."""
        self._data_parallel.before_sum = None

    def take(self) -> NoiseSquares | None:
        """Return the squares of the step measured last; None if its batch has one part alone.

        Call it after ``finish``. A CUDA graph that was captured while a step was measured sets
        the squares of its parts anew in each replay.
        """
        data = self._data_parallel.ctx.dp_cp
        num_parts = self._num_microbatches * data.size
        if num_parts < 2 or not self._parts:
            return None
        whole = torch.zeros((), device=self._data_parallel.ctx.device, dtype=torch.float64)
        for bucket in self._buckets:
            # Ranks beyond the owner hold the same sum and count it once more.
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
        # A stale slot still holds the step before: the part has no gradient for its weight.
        fresh = [s for s in slots if not grad_slot(s.named.parameter).is_stale]
        if fresh:
            self._parts.append(_squares([(s.named, bucket.main_grad(s)) for s in fresh]))


def _squares(gradients: Sequence[tuple[NamedParameter, Tensor]]) -> Float[Tensor, ""]:
    """Add up squares; what several tensor ranks hold counts once over all of them."""
    by_share: dict[float, list[Tensor]] = defaultdict(list)
    for named, gradient in gradients:
        if gradient.numel():
            by_share[held_share(named.layout)].append(gradient)
    total = torch.zeros((), dtype=torch.float64)
    # Shares stay numbers of the host: a tensor of them could not be copied inside a CUDA graph.
    for share, views in by_share.items():
        wide = torch.promote_types(views[0].dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(views, 2.0, dtype=wide)).double()
        total = norms.square().sum() * share + total
    return total
