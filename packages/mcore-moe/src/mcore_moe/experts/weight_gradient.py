"""Gradients of stacked weights, and the grouped GEMM that adds them to main gradients.

If a weight has a main gradient (``grad_slot``), backward adds the weight's gradient to it: at
once, later for pipeline schedules that split backward, or together with other micro-batches.
quack's grouped GEMM adds in its epilogue. With few rows per expert, reading and writing the
main gradient takes longer than the multiplication. So the rows of several micro-batches are
merged, with each expert's rows next to each other, and added by one GEMM. Without quack,
torch's grouped GEMM computes the gradient in the dtype of the rows, and an addition follows.
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
    """Gradient of the results of the rows."""
    x: Float[Tensor, "L K"]
    """The rows."""
    offsets: Int[Tensor, " e1"]
    """First row of each expert, and the end of the last expert's rows; int32."""
    grad_sources: Int[Tensor, " R"] | None = None
    """Index in ``grad`` of each row, if ``grad`` is in another order; int32."""
    x_sources: Int[Tensor, " R"] | None = None
    """Index in ``x`` of each row; None if ``grad_sources`` is given."""

    @property
    def num_rows(self) -> int:
        """R, including rows that belong to no expert."""
        return len(self.grad if self.grad_sources is None else self.grad_sources)

    def in_order(self) -> "Factors":
        """Return the factors with ``grad`` and ``x`` copied to the order of the experts."""
        grad, x = self.grad, self.x
        if self.grad_sources is not None:
            grad = grad.index_select(0, self.grad_sources)
        if self.x_sources is not None:
            x = x.index_select(0, self.x_sources)
        return Factors(grad, x, self.offsets)


def take_weight_gradient(
    slot: GradSlot | None, weight: Float[Tensor, "e N K"], factors: Factors
) -> Float[Tensor, "e N K"] | None:
    """Pass the gradient's factors to the weights' slot, or return the gradient.

    Args:
        slot: adds the gradient to the main gradient, at once or later; None: return the
            gradient.
        weight: the stacked weights.
        factors: of the gradient; the slot stores them until it adds the gradient.
    """
    if slot is not None:
        slot.take_part(add_weight_gradients, factors)
        return None
    # torch's GEMM allocates the gradient in the weight's dtype; quack's needs an output tensor.
    grad, x, offsets, *_ = factors
    has_kernel = x.shape[0] and has_grouped_kernel(x, weight)
    if has_kernel and not quack_gemm.usable(x, weight):
        return F.grouped_mm(grad.t(), x, offs=offsets[1:])  # only quack's GEMMs gather
    gradient = torch.empty_like(weight)
    add_weight_gradients(gradient, [factors], overwrite=True)
    return gradient


def add_weight_gradients(
    main: Float[Tensor, "e N K"], parts: Sequence[Factors], *, overwrite: bool = False
) -> None:
    """Add the gradients of ``parts`` to ``main``: by quack's or torch's GEMM, or by a loop.

    Args:
        main: changed in place.
        parts: factors of one or several micro-batches; on a GPU one grouped GEMM adds all.
        overwrite: replace ``main`` instead of adding to it.
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
    """Group parts by the factor that their GEMM gathers: grad, x or none."""
    groups: dict[tuple[bool, bool], list[Factors]] = {}
    for part in parts:
        kind = part.grad_sources is None, part.x_sources is None
        groups.setdefault(kind, []).append(part)
    return list(groups.values())


def merge_parts(parts: Sequence[Factors]) -> Factors:
    """Return parts merged so that each expert's rows of all parts are next to each other.

    The host does not wait. If the GEMM gathers a factor, its row numbers are permuted, not its
    rows. The first row of an expert depends on all parts, so merging must wait for the last
    part.

    Args:
        parts: of one kind, see ``_by_kind``.
    """
    if len(parts) == 1:
        return parts[0]
    grads, xs, _, grad_sources, x_sources = zip(*parts, strict=True)
    num_rows = sum(part.num_rows for part in parts)
    bounds = torch.stack([F.pad(part.offsets, (0, 1), value=part.num_rows) for part in parts])
    sizes = bounds.diff()  # [parts, e + 1]: rows of each expert, then rows of no expert
    # A segment is the rows of one expert in one part. ``sizes.cumsum`` has the ends of the
    # segments in the order by part (source), ``ends`` in the order by expert (destination).
    # Every row of a segment moves by the difference of the two. Rows of no expert come last.
    ends = sizes.t().flatten().cumsum(0).view(-1, len(parts)).t().flatten()
    sizes = sizes.flatten()
    moves = (ends - sizes.cumsum(0)).repeat_interleave(sizes, output_size=num_rows)
    destinations = torch.arange(num_rows, device=moves.device) + moves
    offsets = bounds[:, :-1].sum(0, dtype=torch.int32)
    # ``put_rows`` leaves rows with the number num_rows out: no GEMM reads rows of no expert.
    copy_destinations = destinations.where(destinations < offsets[-1], num_rows)
    grad, grad_sources = _merge_side(grads, grad_sources, destinations, copy_destinations)
    x, x_sources = _merge_side(xs, x_sources, destinations, copy_destinations)
    return Factors(grad, x, offsets, grad_sources, x_sources)


def _merge_side(
    parts: tuple[Tensor, ...],
    sources: tuple[Tensor | None, ...],
    destinations: Tensor,
    copy_destinations: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return one factor's merged rows, and their sources if the factor is gathered.

    Copies the rows to ``copy_destinations``. If the factor is gathered, concatenates the rows
    and permutes only their sources, to ``destinations``.
    """
    part_sources = [numbers for numbers in sources if numbers is not None]
    if not part_sources:
        rows = parts[0].new_empty(len(destinations), parts[0].shape[1])
        part_destinations = copy_destinations.split([len(part) for part in parts])
        for part, row_ids in zip(parts, part_destinations, strict=True):
            put_rows(rows, part, row_ids)
        return rows, None
    # Sources count from the first row of their part: add that row's number.
    begins = accumulate((len(part) for part in parts), initial=0)
    merged = torch.cat(
        [numbers + begin for numbers, begin in zip(part_sources, begins, strict=False)]
    )
    return torch.cat(parts), torch.empty_like(merged).index_copy_(0, destinations, merged)


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
    """Return the rows of each expert, then the rows of no expert; the host waits."""
    sizes = offsets.diff().tolist()
    return x.split([*sizes, x.shape[0] - sum(sizes)])


def has_grouped_kernel(x: Float[Tensor, "R K"], weight: Float[Tensor, "e N K"]) -> bool:
    """Return whether torch's grouped GEMM supports these tensors, eager and compiled.

    On torch 2.11: bfloat16 with rows of a multiple of 16 bytes; on CUDA from compute
    capability 8.0.
    """
    aligned = all(n * x.element_size() % 16 == 0 for n in weight.shape[1:])
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    return aligned and x.dtype == torch.bfloat16
