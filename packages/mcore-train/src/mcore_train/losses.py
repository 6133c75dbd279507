"""Places micro-batches on a rank, and computes the weight of each token in the step's loss.

All losses are sums. The loss of a micro-batch on a rank is the sum of its token losses divided
by the valid tokens of the whole step, over all micro-batches, data and context ranks. These
tokens are counted before the first forward pass, so the gradient does not depend on how the
batch is split.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_models.protocol import TEXT, BatchEntry, MicroBatch
from mcore_parallel.collectives import all_reduce
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.context_parallel.zigzag import zigzag_split
from mcore_parallel.mesh import ParallelContext


class StepLosses:
    """Sums of the losses of a step's micro-batches on this rank, without gradients.

    Attributes:
        named: losses of the objective by name, without their coefficients.
        aux_loss: auxiliary losses of experts.
    """

    def __init__(self, device: torch.device, names: Collection[str]) -> None:
        zero = partial(torch.zeros, (), dtype=torch.float64, device=device)
        self.named = {name: zero() for name in names}
        self.aux_loss = zero()

    def clone(self) -> "StepLosses":
        """Return a copy that later sums into this one do not change."""
        copy = StepLosses(self.aux_loss.device, ())
        copy.named = {name: value.clone() for name, value in self.named.items()}
        copy.aux_loss = self.aux_loss.clone()
        return copy


def place(
    batch: Mapping[str, Tensor],
    ctx: ParallelContext,
    *,
    has_own_positions: bool = False,
    entries: Mapping[str, BatchEntry] = TEXT,
    read: Collection[str] = tuple(TEXT),
) -> MicroBatch:
    """Move a batch to this rank's device and keep its context rank's part; no communication.

    Args:
        batch: the entries and, if they are used, position_ids; batch first. With cu_seqlens,
            [B, n] and on the CPU, rows are packed (``Documents``) and position_ids are used.
        ctx: the layout.
        has_own_positions: whether rows count their positions themselves
            (``--reset-position-ids``).
        entries: of the model.
        read: entries that this rank's pipeline stages read, which the batch must have. Other
            entries of the batch become meta tensors, which keep only their shape.
    """
    documents = None
    if "cu_seqlens" in batch:
        packed = Documents.from_cu_seqlens(batch["cu_seqlens"])
        documents = None if packed.are_whole_rows else packed

    def place_entry(name: str, entry: BatchEntry) -> Tensor:
        device = ctx.device if name in read else torch.device("meta")
        tensor = batch[name].to(device, non_blocking=True)
        return zigzag_split(tensor, ctx.cp, 1) if entry.is_cut and tensor.dim() > 1 else tensor

    has_positions = has_own_positions or documents is not None
    placed_entries = {
        n: place_entry(n, entry) for n, entry in entries.items() if n in read or n in batch
    }
    positions = batch.get("position_ids") if has_positions else None
    if positions is not None:
        positions = zigzag_split(positions.to(ctx.device, non_blocking=True), ctx.cp, 1)
    return MicroBatch(placed_entries, positions, documents)


def count_valid(
    masks: Sequence[Mapping[str, Float[Tensor, "..."]]], ctx: ParallelContext
) -> dict[str, Float[Tensor, ""]]:
    """Sum the masks of each loss over a step; all-reduces over data and context ranks.

    Args:
        masks: of this rank's micro-batches, by name of the loss.
        ctx: the layout.

    Returns:
        Sums by name of the loss, float64, on the device; 0 for a step without valid tokens.
    """
    names = list(masks[0])
    sums = [
        torch.stack([mask[name].sum(dtype=torch.float64) for mask in masks]).sum()
        for name in names
    ]
    return dict(zip(names, all_reduce(torch.stack(sums), ctx.dp_cp).unbind(), strict=True))


def loss_weights(
    masks: Mapping[str, Float[Tensor, "..."]],
    coefficients: Mapping[str, float],
    num_valid: Mapping[str, Float[Tensor, ""]],
    dtype: torch.dtype,
) -> dict[str, Float[Tensor, "..."]]:
    """Return each token's factors in the step's losses: mask x coefficient / global count.

    Args:
        masks: of one micro-batch, by name of the loss.
        coefficients: of the losses; 0: a metric, whose factors are mask / global count.
        num_valid: of ``count_valid``.
        dtype: of the model; the factors are float32 or wider.
    """
    wide = torch.promote_types(dtype, torch.float32)
    weights = {}
    for name, mask in masks.items():
        factor = mask.to(wide) / num_valid[name].clamp(min=1.0).to(wide)
        coefficient = coefficients[name] or 1.0
        weights[name] = factor if coefficient == 1.0 else factor * coefficient
    return weights
