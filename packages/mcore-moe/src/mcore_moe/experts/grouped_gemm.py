"""GEMMs of rows sorted by expert with stacked weights: a loop over experts, or one kernel.

``sequential_linear`` loops over the experts; ``grouped_linear`` is one grouped GEMM if device
and dtype support it. Both compute the same function. If the weight has a main gradient
(``grad_slot``), ``accumulating_linear`` adds to it in backward: see ``weight_gradient``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mcore_moe.experts.weight_gradient import (
    Factors,
    has_grouped_kernel,
    rows_by_expert,
    take_weight_gradient,
)
from mcore_moe.kernels import quack_gemm
from mcore_parallel.autograd.functions import OnceDifferentiable, cast_factor
from mcore_parallel.autograd.grad_slot import slot_of

Linear = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function with the arguments of ``sequential_linear``."""


def sequential_linear(
    x: Float[Tensor, "R K"], weight: Float[Tensor, "e N K"], offsets: Int[Tensor, " e1"]
) -> Float[Tensor, "R N"]:
    """Multiply each expert's rows with its weight, one expert after the other.

    The host waits for ``offsets``.

    Args:
        x: rows sorted by expert.
        weight: of all experts of this rank.
        offsets: first row of each expert, and the end of the last expert's rows; int32. Results
            of later rows are zero.
    """
    x, weight = cast_factor(x), cast_factor(weight)
    *parts, rest = rows_by_expert(x, offsets)
    results = [F.linear(rows, w) for rows, w in zip(parts, weight, strict=True)]
    return torch.cat([*results, x.new_zeros(rest.shape[0], weight.shape[1])])


def grouped_linear(
    x: Float[Tensor, "R K"], weight: Float[Tensor, "e N K"], offsets: Int[Tensor, " e1"]
) -> Float[Tensor, "R N"]:
    """Multiply each expert's rows with its weight in one kernel; the host does not wait.

    Same arguments as ``sequential_linear``, which computes tensors that the kernel does not
    support: see ``has_grouped_kernel``.
    """
    x, weight = cast_factor(x), cast_factor(weight)
    if not has_grouped_kernel(x, weight):
        return sequential_linear(x, weight, offsets)
    if x.shape[0] == 0:
        return F.linear(x, weight[0])  # the kernel does not support tensors without rows
    return _GroupedLinear.apply(x, weight, offsets)


def accumulating_linear(
    x: Float[Tensor, "R K"],
    weight: Float[Tensor, "e N K"],
    offsets: Int[Tensor, " e1"],
    *,
    linear: Linear,
) -> Float[Tensor, "R N"]:
    """Return ``linear(x, weight, offsets)``; backward adds to the weight's main gradient.

    The weight's ``grad`` stays None. With a queue in the weight's slot, the rows and the
    gradient of the result are stored until the queue computes the weight's gradient.

    Args:
        x: rows sorted by expert.
        weight: of all experts of this rank, with a main gradient in its slot.
        offsets: as in ``sequential_linear``.
        linear: ``grouped_linear`` or ``sequential_linear``.
    """
    return _AccumulatingLinear.apply(x, weight, offsets, linear)


class _GroupedLinear(OnceDifferentiable):
    """The grouped GEMM with a backward that accepts gradients of any strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return _multiply(x, weight.transpose(1, 2), offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad, grad_weight = grad.contiguous(), None
        grad_x = _multiply(grad, weight, offsets) if needs_x else None
        if needs_weight:
            grad_weight = take_weight_gradient(None, weight, Factors(grad, x, offsets))
        return grad_x, grad_weight, None


def _multiply(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply sorted rows with weights ``[e, K, N]`` by quack's GEMM or torch's."""
    if quack_gemm.sorts_faster(weight) and quack_gemm.usable(x, weight):
        return quack_gemm.multiply(x, weight, offsets)
    return F.grouped_mm(x, weight, offs=offsets[1:])


class _AccumulatingLinear(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, linear: Linear) -> Tensor:
        # Saved tensors may be copies, without a slot: take the slot from the original.
        ctx.slot, ctx.linear = slot_of(weight), linear
        x, weight = cast_factor(x), cast_factor(weight)
        ctx.save_for_backward(x, weight, offsets)
        return linear(x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.linear(grad, weight.transpose(1, 2), offsets)
        if ctx.needs_input_grad[1]:
            take_weight_gradient(ctx.slot, weight, Factors(grad, x, offsets))
        return grad_x, None, None, None
