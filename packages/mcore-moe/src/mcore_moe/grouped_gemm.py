"""Rows sorted by expert times stacked weights: one expert after the other, or in one kernel.

The sequential form loops over the experts; the grouped GEMM is a single kernel. Both compute
the same function; device and dtype decide which one runs. Either may defer the gradient of its
weights, for pipeline schedules that split backward.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.autocasting import cast_factor
from mcore_parallel.grad_slot import GradSlot, grad_slot


def sequential_linear(
    x: Float[Tensor, "R K"], weight: Float[Tensor, "e N K"], counts: Int[Tensor, " e"]
) -> Float[Tensor, "R N"]:
    """Multiply each expert's rows with its weight, one expert after the other.

    The host waits for the device to learn ``counts``.

    Args:
        x: rows sorted by expert.
        weight: of all experts of this rank.
        counts: rows of each; their sum is R.
    """
    x, weight = cast_factor(x), cast_factor(weight)
    parts = x.split(counts.tolist())
    return torch.cat([F.linear(rows, w) for rows, w in zip(parts, weight, strict=True)])


def grouped_linear(
    x: Float[Tensor, "R K"], weight: Float[Tensor, "e N K"], counts: Int[Tensor, " e"]
) -> Float[Tensor, "R N"]:
    """Multiply each expert's rows with its weight in one kernel; no wait for the device.

    Same arguments as ``sequential_linear``, which also computes what the kernel cannot:
    see ``has_grouped_kernel``.
    """
    x, weight = cast_factor(x), cast_factor(weight)
    if not has_grouped_kernel(x, weight):
        return sequential_linear(x, weight, counts)
    if x.shape[0] == 0:
        return F.linear(x, weight[0])  # the kernel refuses tensors without rows
    return _GroupedLinear.apply(x, weight, counts.cumsum(0).to(torch.int32))


def deferred_linear(
    x: Float[Tensor, "R K"],
    weight: Float[Tensor, "e N K"],
    counts: Int[Tensor, " e"],
    *,
    linear: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Float[Tensor, "R N"]:
    """Multiply as ``linear``, with the weight's gradient deferred to its slot's queue.

    The rows and the gradient of the result are kept until it is made, which adds it to the
    weight's main gradient.

    Args:
        x: rows sorted by expert.
        weight: of all experts of this rank, with a queue and a main gradient in its slot.
        counts: rows of each.
        linear: ``grouped_linear`` or ``sequential_linear``.
    """
    return _DeferredLinear.apply(x, weight, counts, linear)


def has_grouped_kernel(x: Float[Tensor, "R K"], weight: Float[Tensor, "e N K"]) -> bool:
    """Return whether torch's grouped GEMM takes these tensors, eager and compiled alike.

    On torch 2.11: bfloat16 with rows of a multiple of 16 bytes; on CUDA from compute
    capability 8.0.
    """
    aligned = all(n * x.element_size() % 16 == 0 for n in weight.shape[1:])
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    return aligned and x.dtype == torch.bfloat16


class _GroupedLinear(torch.autograd.Function):
    """The grouped GEMM with a backward that takes gradients of any strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        grad_x = F.grouped_mm(grad, weight, offs=offsets) if needs_x else None
        grad_weight = F.grouped_mm(grad.t(), x, offs=offsets) if needs_weight else None
        return grad_x, grad_weight, None


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        linear: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        # Saved tensors may come back as copies; the slot is the original's.
        ctx.slot, ctx.linear = grad_slot(weight), linear
        x, weight = cast_factor(x), cast_factor(weight)
        ctx.save_for_backward(x, weight, counts)
        return linear(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, counts = ctx.saved_tensors
        grad, slot = grad.contiguous(), ctx.slot
        if ctx.needs_input_grad[1]:
            slot.queue.put(lambda: _add_weight_gradient(slot, grad, x, counts))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.linear(grad, weight.transpose(1, 2), counts)
        return grad_x, None, None, None


def _add_weight_gradient(slot: GradSlot, grad: Tensor, x: Tensor, counts: Tensor) -> None:
    """Add the gradient of stacked weights to their main gradient, and say so."""
    assert slot.main is not None
    if x.shape[0] and has_grouped_kernel(x, slot.main):
        offsets = counts.cumsum(0).to(torch.int32)
        slot.main.add_(F.grouped_mm(grad.t(), x, offs=offsets))
    else:
        parts = zip(grad.split(counts.tolist()), x.split(counts.tolist()), strict=True)
        for total, (rows, inputs) in zip(slot.main, parts, strict=True):
            total.add_(rows.t() @ inputs)
    slot.ready()
