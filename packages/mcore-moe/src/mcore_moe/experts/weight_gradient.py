"""Gradients of stacked weights: where they go, and the GEMM that adds them there.

Where a weight has a main gradient (``grad_slot``), its gradient is added to it in the epilogue
of a grouped GEMM on a GPU: at once, later for pipeline schedules that split backward, or with
those of other micro-batches. Few rows an expert take less time to multiply than the main
gradient takes to be read and written, which the rows of several micro-batches then share:
quack's GEMM takes copies of them, each expert's side by side, and a kernel in Triton reads them
where they lie.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mcore_moe.dispatch.permutation import put_rows
from mcore_moe.kernels import quack_gemm
from mcore_parallel.grad_slot import GradSlot, accumulate_matmul
from mcore_parallel.optional_kernels import OptionalKernel, wave, works


class Factors(NamedTuple):
    """What the gradient of stacked weights is the matmul of: ``grad^T x``, expert by expert."""

    grad: Float[Tensor, "M N"]
    """Gradient of the rows' results."""
    x: Float[Tensor, "L K"]
    """The rows."""
    offsets: Int[Tensor, " e1"]
    """Where the rows of each expert begin, and the end of the last; int32."""
    grad_sources: Int[Tensor, " R"] | None = None
    """Row of ``grad`` for each row, if it is in another order; int32."""
    x_sources: Int[Tensor, " R"] | None = None
    """Row of ``x`` likewise; only one of the two may be."""

    @property
    def num_rows(self) -> int:
        """R, with those behind the last expert's."""
        return len(self.grad if self.grad_sources is None else self.grad_sources)

    def in_order(self) -> "Factors":
        """Copy what is in another order to the order of experts."""
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
    grad, x, offsets, *_ = factors
    has_kernel = x.shape[0] and has_grouped_kernel(x, weight)
    if has_kernel and not quack_gemm.usable(x, weight):
        return F.grouped_mm(grad.t(), x, offs=offsets[1:])  # quack alone gathers
    gradient = torch.empty_like(weight)
    add_weight_gradients(gradient, [factors], overwrite=True)
    return gradient


def add_weight_gradients(
    main: Float[Tensor, "e N K"], parts: Sequence[Factors], *, overwrite: bool = False
) -> None:
    """Add the gradient of stacked weights by the fastest GEMM that is there.

    Args:
        main: changed in place.
        parts: factors of a micro-batch or of some, which one kernel adds at once on a GPU:
            quack's, of merged rows, or one that reads them where they lie.
        overwrite: replace ``main``.
    """
    parts = [part for part in parts if part.x.shape[0] and part.grad.shape[0]]
    if not parts and overwrite:
        main.zero_()
    if len(parts) > 1 and quack_gemm.usable(parts[0].x, main):
        parts = [merge_parts(alike) for alike in _by_kind(parts)]
    elif len(parts) > 1 and _has_accumulating_kernel(main, parts[0].x):
        from mcore_moe.kernels.weight_grad import fused_weight_gradient

        for alike in _by_kind(parts):
            fused_weight_gradient(main, alike, overwrite=overwrite)
            overwrite = False
        return
    for part in parts:
        _add_weight_gradient(main, part, overwrite=overwrite)
        overwrite = False


def _by_kind(parts: Sequence[Factors]) -> list[list[Factors]]:
    """Group parts by what they gather."""
    groups: dict[tuple[bool, bool], list[Factors]] = {}
    for part in parts:
        kind = part.grad_sources is None, part.x_sources is None
        groups.setdefault(kind, []).append(part)
    return list(groups.values())


def merge_parts(parts: Sequence[Factors]) -> Factors:
    """Copy the rows that an expert has in all parts next to each other.

    The host waits for nothing. A side whose rows are in another order stays in that order:
    their numbers alone move. Where the rows of an expert begin depends on all parts, so they
    cannot be written to their place before the last part is there.

    Args:
        parts: which gather alike.
    """
    if len(parts) == 1:
        return parts[0]
    grads, xs, _, grad_sources, x_sources = zip(*parts, strict=True)
    num_rows = sum(part.num_rows for part in parts)
    bounds = torch.stack([F.pad(part.offsets, (0, 1), value=part.num_rows) for part in parts])
    sizes = bounds.diff()  # [parts, e + 1]: the last are of no expert
    # An expert's rows of a part move from their end in that order to the one by experts.
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
    """Copy rows to their places, or their numbers if they are in another order."""
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
    elif _has_accumulating_kernel(main, factors.x):
        from mcore_moe.kernels.weight_grad import fused_weight_gradient

        fused_weight_gradient(main, [factors], overwrite=overwrite)
    elif has_grouped_kernel(factors.x, main):
        grad, x, offsets, *_ = factors.in_order()
        total = F.grouped_mm(grad.t(), x, offs=offsets[1:])
        main.copy_(total) if overwrite else main.add_(total)
    else:
        add_weight_gradient_plain(main, factors, overwrite=overwrite)


def add_weight_gradient_plain(
    main: Float[Tensor, "e N K"], factors: Factors, *, overwrite: bool = False
) -> None:
    """Reference of ``kernels.weight_grad.fused_weight_gradient``, expert by expert."""
    grad, x, offsets, *_ = factors.in_order()
    parts = zip(main, rows_by_expert(grad, offsets), rows_by_expert(x, offsets), strict=False)
    for total, rows, inputs in parts:
        accumulate_matmul(total, rows.t(), inputs, overwrite=overwrite)


def rows_by_expert(
    x: Float[Tensor, "R K"], offsets: Int[Tensor, " e1"]
) -> tuple[Float[Tensor, "_ K"], ...]:
    """Return the rows of each expert, and those behind the last; the host waits."""
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


def _has_accumulating_kernel(main: Tensor, x: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and main.dtype == torch.float32
        and main.is_contiguous()
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and works(WEIGHT_GRAD_KERNEL, x.device, x.dtype)
    )


def _try_kernel(device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    from mcore_moe.kernels.weight_grad import fused_weight_gradient

    offsets = torch.tensor([0, 5, 5, 16], dtype=torch.int32, device=device)
    sources = torch.arange(16, dtype=torch.int32, device=device) * 5 % 7
    grad, x = (wave(16, n, device=device, dtype=dtype) for n in (24, 40))
    plain = Factors(grad, x, offsets)
    pairs = []
    for part, number, overwrite in (
        (plain, 1, False),
        (plain, 1, True),
        (plain._replace(x=x[:7], x_sources=sources), 2, False),
        (plain._replace(grad=grad[:7], grad_sources=sources), 3, True),
    ):
        got, want = (wave(3, 24, 40, device=device, dtype=torch.float32) for _ in range(2))
        fused_weight_gradient(got, [part] * number, overwrite=overwrite)
        wide = part._replace(grad=part.grad.float(), x=part.x.float())
        for place in range(number):
            add_weight_gradient_plain(want, wide, overwrite=overwrite and not place)
        pairs.append((got, want))
    return pairs


WEIGHT_GRAD_KERNEL = OptionalKernel(
    "main gradients of experts in Triton", ("triton",), _try_kernel
)
