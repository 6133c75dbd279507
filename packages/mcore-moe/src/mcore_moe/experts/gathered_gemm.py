"""Linears from tokens to rows and back, by GEMMs that gather tokens instead of copying them.

``gathered_linear`` reads a token once for each of its rows. ``summed_linear`` sums a token's
rows, and its backward reads the gradient of the sum once for each row. Autograd saves tokens,
not rows. The reference is ``permute``, ``grouped_linear``, ``unpermute``. In fp8 tokens are
cast first, and their rows are copied at one byte per number.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from mcore_moe.dispatch.permutation import RowPlan
from mcore_moe.experts.fp8_rows import multiply_rows, weight_casts
from mcore_moe.experts.weight_gradient import Factors, take_weight_gradient
from mcore_moe.kernels.fp8_rows import cast_rows
from mcore_moe.kernels.quack_gemm import multiply
from mcore_moe.kernels.rows import sum_rows
from mcore_parallel.autograd.functions import OnceDifferentiable, cast_factor
from mcore_parallel.autograd.grad_slot import slot_of
from mcore_parallel.precision.fp8 import WeightCasts


def gathered_linear(
    x: Float[Tensor, "M K"],
    weight: Float[Tensor, "e N K"],
    plan: RowPlan,
    casts: WeightCasts | None = None,
) -> Float[Tensor, "R N"]:
    """Return for each row the product of its token with its expert's weight.

    Args:
        x: tokens.
        weight: of all experts of this rank.
        plan: rows; ``plan.is_dense`` must be true.
        casts: see ``fp8_rows.fp8_linear``; None: multiply in the dtype of the tokens.
    """
    return _GatheredGemm.apply(x, weight, plan.sources, plan.slots, plan.offsets, casts)


def summed_linear(
    rows: Float[Tensor, "R K"],
    weight: Float[Tensor, "e N K"],
    plan: RowPlan,
    casts: WeightCasts | None = None,
) -> Float[Tensor, "M N"]:
    """Multiply each row with its expert's weight; return the sum of each token's rows."""
    return _SummedGemm.apply(rows, weight, plan.sources, plan.slots, plan.offsets, casts)


def _times_rows(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    sources: Tensor | None,
    casts: WeightCasts | None,
    *,
    transposed: bool,
) -> Tensor:
    """Multiply rows with weights ``[e, N, K]``, or gradients with the transposed weights."""
    if casts is None:
        return multiply(x, weight if transposed else weight.mT, offsets, sources)
    rows = cast_rows(x)
    if sources is not None:
        rows = rows.select_rows(sources)
    return multiply_rows(rows, weight_casts(weight, casts)[transposed], offsets, x.dtype)


class _GatheredGemm(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        sources: Tensor,
        slots: Tensor,
        offsets: Tensor,
        casts: WeightCasts | None,
    ) -> Tensor:
        # Saved tensors may be copies, without a slot: take the slot from the original.
        ctx.slot, ctx.casts = slot_of(weight), casts
        x, weight = cast_factor(x).contiguous(), cast_factor(weight)
        ctx.save_for_backward(x, weight, sources, slots, offsets)
        return _times_rows(x, weight, offsets, sources, casts, transposed=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, sources, slots, offsets = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            rows = _times_rows(grad, weight, offsets, None, ctx.casts, transposed=True)
            grad_x = sum_rows(rows, slots)
        if ctx.needs_input_grad[1]:
            factors = Factors(grad, x, offsets, x_sources=sources)
            grad_weight = take_weight_gradient(ctx.slot, weight, factors)
        return grad_x, grad_weight, None, None, None, None


class _SummedGemm(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        sources: Tensor,
        slots: Tensor,
        offsets: Tensor,
        casts: WeightCasts | None,
    ) -> Tensor:
        ctx.slot, ctx.casts = slot_of(weight), casts
        rows, weight = cast_factor(rows), cast_factor(weight)
        ctx.save_for_backward(rows, weight, sources, offsets)
        y = _times_rows(rows, weight, offsets, None, casts, transposed=False)
        return sum_rows(y, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight, sources, offsets = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = _times_rows(grad, weight, offsets, sources, ctx.casts, transposed=True)
        if ctx.needs_input_grad[1]:
            factors = Factors(grad, rows, offsets, grad_sources=sources)
            grad_weight = take_weight_gradient(ctx.slot, weight, factors)
        return grad_rows, grad_weight, None, None, None, None
