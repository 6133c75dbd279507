"""From a micro-batch to its share of the step's loss.

Everything sums. The loss of a micro-batch on a rank is the sum of its token losses divided
by the valid tokens of the whole step, over all micro-batches, data and context ranks. That
count is taken before the first forward pass, so any split of a batch gives one gradient.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.context_parallel.zigzag import zigzag_split
from mcore_parallel.mesh import ParallelContext


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch as this rank sees it: its context rank's part of each sequence."""

    tokens: Int[Tensor, "B Q"]
    labels: Int[Tensor, "B Q"]
    loss_mask: Float[Tensor, "B Q"]
    positions: Int[Tensor, "B Q"] | None
    """Places of the tokens where rows count them themselves; None: from 0 to S-1."""
    documents: Documents | None = None
    """Documents that the whole rows pack and that do not see each other."""


class StepLosses:
    """Sums of the losses of a step's micro-batches on this rank, without gradients."""

    def __init__(self, device: torch.device) -> None:
        """Begin at zero."""
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.aux_loss = torch.zeros((), dtype=torch.float64, device=device)

    def clone(self) -> "StepLosses":
        """Return a copy that later sums into this one do not change."""
        copy = StepLosses(self.loss.device)
        copy.loss, copy.aux_loss = self.loss.clone(), self.aux_loss.clone()
        return copy


ENTRIES = ("tokens", "labels", "loss_mask")
"""What every batch has of each token."""


def place(
    batch: Mapping[str, Tensor],
    ctx: ParallelContext,
    *,
    has_own_positions: bool = False,
    read: Collection[str] = ENTRIES,
) -> MicroBatch:
    """Move a batch to this rank's device and keep its context rank's part; no communication.

    Args:
        batch: tokens, labels, loss_mask and, if they are used, position_ids, each [B, S];
            with cu_seqlens, [B, n] and on the CPU, rows are packed (``Documents``) and
            position_ids count.
        ctx: the layout.
        has_own_positions: whether rows count their positions themselves
            (``--reset-position-ids``).
        read: entries that this rank's pipeline stages read, which the batch must have. Of the
            others only the shape is kept, on the meta device.
    """
    documents = None
    if "cu_seqlens" in batch:
        packed = Documents.from_cu_seqlens(batch["cu_seqlens"])
        documents = None if packed.are_whole_rows else packed

    def part(name: str) -> Tensor:
        return zigzag_split(batch[name].to(ctx.device, non_blocking=True), ctx.cp, 1)

    shape = zigzag_split(batch["tokens"].to("meta"), ctx.cp, 1)
    return MicroBatch(
        part("tokens") if "tokens" in read else shape,
        part("labels") if "labels" in read else shape,
        part("loss_mask") if "loss_mask" in read else shape.float(),
        part("position_ids") if has_own_positions or documents is not None else None,
        documents,
    )


def count_valid_tokens(
    batches: Sequence[MicroBatch], ctx: ParallelContext
) -> Float[Tensor, ""]:
    """Count the tokens of a step that have a loss; all-reduces over data and context ranks.

    Returns:
        The count in float64, on the device. A step without any gives 0.
    """
    sums = [batch.loss_mask.sum(dtype=torch.float64) for batch in batches]
    return all_reduce(torch.stack(sums).sum(), ctx.dp_cp)


def token_weights(
    batch: MicroBatch, num_valid: Float[Tensor, ""], dtype: torch.dtype
) -> Float[Tensor, "B Q"]:
    """Return each token's factor in the step's loss: its mask over the global count.

    Args:
        batch: holds the mask.
        num_valid: of ``count_valid_tokens``.
        dtype: of the model; the factors are float32 or wider.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return batch.loss_mask.to(wide) / num_valid.clamp(min=1.0).to(wide)
