"""Gradients of stacked weights: where they go, and the GEMM that adds them there.

Where a weight has a main gradient (``grad_slot``), backward adds the gradient to it: at once,
later for pipeline schedules that split backward, or together with those of other micro-batches.
quack's grouped GEMM adds in its epilogue. With few rows an expert it takes longer to read and
write the main gradient than to multiply, so the rows of several micro-batches are merged, each
expert's next to each other, and added by one GEMM. Without quack torch's grouped GEMM makes the
gradient in the dtype of the rows, and an addition follows.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mcore_moe.kernels import quack_gemm
from mcore_moe.kernels.rows import put_rows
from mcore_parallel.autograd.grad_slot import GradSlot, accumulate_matmul


class Factors(NamedTuple):
    """Factors of the gradient of stacked weights: ``grad^T x``, expert by expert."""

    grad: Float[Tensor, "M N"]
    """Gradient of the rows' results."""
    x: Float[Tensor, "L K"]
    """The rows."""
    offsets: Int[Tensor, " e1"]
    """Where the rows of each expert begin, and the end of the last; int32."""
    grad_sources: Int[Tensor, " R"] | None = None
    """Row of ``grad`` for each row, if it is in another order; int32."""
    x_sources: Int[Tensor, " R"] | None = None
    """Row of ``x`` for each row; at most one of the two is given."""

    @property
    def num_rows(self) -> int:
        """R, including rows after those of the last expert."""
        return len(self.grad if self.grad_sources is None else self.grad_sources)

    def in_order(self) -> "Factors":
        """Return the factors with both sides copied to the order of experts."""
        grad, x = self.grad, self.x
        if self.grad_sources is not None:
            grad = grad.index_select(0, self.grad_sources)
        if self.x_sources is not None:
            x = x.index_select(0, self.x_sources)
        return Factors(grad, x, self.offsets)


def take_weight_gradient(
    slot: GradSlot | None, weight: Float[Tensor, "e N K"], factors: Factors
) -> Float[Tensor, "e N K"] | None:
    """Add the gradient of stacked weights to their main gradient, at once or later.

    Args:
        slot: of the weights; None: return the gradient.
        weight: the weights.
        factors: of the gradient; kept until it is added.
    """
    if slot is not None:
        slot.take_part(add_weight_gradients, factors)
        return None
    # A single GEMM makes the gradient in the weight's dtype; quack's needs a tensor to fill.
    grad, x, offsets, *_ = factors
    has_kernel = x.shape[0] and has_grouped_kernel(x, weight)
    if has_kernel and not quack_gemm.usable(x, weight):
        return F.grouped_mm(grad.t(), x, offs=offsets[1:])  # without quack nothing is gathered
    gradient = torch.empty_like(weight)
    add_weight_gradients(gradient, [factors], overwrite=True)
    return gradient


def add_weight_gradients(
    main: Float[Tensor, "e N K"], parts: Sequence[Factors], *, overwrite: bool = False
) -> None:
    """Add the gradient of stacked weights: by quack's GEMM, torch's, or expert by expert.

    Args:
        main: changed in place.
        parts: factors of one micro-batch or of several, which one grouped GEMM adds on a GPU.
        overwrite: replace ``main``.
    """
    parts = [part for part in parts if part.x.shape[0] and part.grad.shape[0]]
    if not parts and overwrite:
        main.zero_()
    if len(parts) > 1 and parts[0].x.is_cuda and has_grouped_kernel(parts[0].x, main):
        parts = [merge_parts(alike) for alike in _by_kind(parts)]
    for part in parts:
        _add_weight_gradient(main, part, overwrite=overwrite)
        overwrite = False


def _by_kind(parts: Sequence[Factors]) -> list[list[Factors]]:
    """Group parts by the side that their GEMM gathers: grad, x or none."""
    groups: dict[tuple[bool, bool], list[Factors]] = {}
    for part in parts:
        kind = part.grad_sources is None, part.x_sources is None
        groups.setdefault(kind, []).append(part)
    return list(groups.values())


def merge_parts(parts: Sequence[Factors]) -> Factors:
    """Concatenate parts so that each expert's rows of all parts are next to each other.

    The host waits for nothing. Of a side that a GEMM gathers the row numbers are permuted, not
    the rows. The begin of an expert's rows depends on all parts, so rows cannot be written to
    their place before the last part has come.

    Args:
        parts: of one kind, see ``_by_kind``.
    """
    if len(parts) == 1:
        return parts[0]
    grads, xs, _, grad_sources, x_sources = zip(*parts, strict=True)
    num_rows = sum(part.num_rows for part in parts)
    bounds = torch.stack([F.pad(part.offsets, (0, 1), value=part.num_rows) for part in parts])
    sizes = bounds.diff()  # [parts, e + 1]: rows of each expert, last those of none
    # A segment is the rows of one expert in one part. ``sizes.cumsum`` has the ends of the
    # segments by part (how rows lie), ``ends`` those by expert (where they go): every row of a
    # segment moves by the difference.
    ends = sizes.t().flatten().cumsum(0).view(-1, len(parts)).t().flatten()
    sizes = sizes.flatten()
    moves = (ends - sizes.cumsum(0)).repeat_interleave(sizes, output_size=num_rows)
    places = torch.arange(num_rows, device=moves.device) + moves
    grad, grad_sources = _merge_side(grads, grad_sources, places)
    x, x_sources = _merge_side(xs, x_sources, places)
    offsets = bounds[:, :-1].sum(0, dtype=torch.int32)
    return Factors(grad, x, offsets, grad_sources, x_sources)


def _merge_side(
    parts: tuple[Tensor, ...], sources: tuple[Tensor | None, ...], places: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Copy rows to their places; of a gathered side concatenate rows, and permute numbers."""
    numbers = [own for own in sources if own is not None]
    if not numbers:
        rows = parts[0].new_empty(len(places), parts[0].shape[1])
        for part, at in zip(parts, places.split([len(part) for part in parts]), strict=True):
            put_rows(rows, part, at)
        return rows, None
    begins = accumulate((len(part) for part in parts), initial=0)
    moved = torch.cat([own + begin for own, begin in zip(numbers, begins, strict=False)])
    return torch.cat(parts), torch.empty_like(moved).index_copy_(0, places, moved)


def _add_weight_gradient(main: Tensor, factors: Factors, *, overwrite: bool) -> None:
    if quack_gemm.usable(factors.x, main):
        quack_gemm.add_weight_gradient(main, **factors._asdict(), overwrite=overwrite)
    elif has_grouped_kernel(factors.x, main):
        grad, x, offsets, *_ = factors.in_order()
        total = F.grouped_mm(grad.t(), x, offs=offsets[1:])
        main.copy_(total) if overwrite else main.add_(total)
    else:
        add_weight_gradient_plain(main, factors, overwrite=overwrite)


def add_weight_gradient_plain(
    main: Float[Tensor, "e N K"], factors: Factors, *, overwrite: bool = False
) -> None:
    """Reference of ``add_weight_gradients`` for one part, expert by expert; the host waits."""
    grad, x, offsets, *_ = factors.in_order()
    parts = zip(main, rows_by_expert(grad, offsets), rows_by_expert(x, offsets), strict=False)
    for total, rows, inputs in parts:
        accumulate_matmul(total, rows.t(), inputs, overwrite=overwrite)


def rows_by_expert(
    x: Float[Tensor, "R K"], offsets: Int[Tensor, " e1"]
) -> tuple[Float[Tensor, "_ K"], ...]:
    """Return the rows of each expert, and the rows of none; the host waits."""
    sizes = offsets.diff().tolist()
    return x.split([*sizes, x.shape[0] - sum(sizes)])


def has_grouped_kernel(x: Float[Tensor, "R K"], weight: Float[Tensor, "e N K"]) -> bool:
    """Return whether torch's grouped GEMM takes these tensors, eager and compiled alike.

    On torch 2.11: bfloat16 with rows of a multiple of 16 bytes; on CUDA from compute
    capability 8.0.
    """
    aligned = all(n * x.element_size() % 16 == 0 for n in weight.shape[1:])
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    return aligned and x.dtype == torch.bfloat16
