"""GEMMs with a weight split over the tensor ranks: the functional core of the linears.

Under sequence parallelism tokens are gathered before a column-parallel GEMM and summed and
reduce-scattered after a row-parallel one. The ``Gemm`` object defines the GEMMs, this module
the communication.

A weight whose ``GradSlot`` has a main gradient has its gradient added there, else autograd gets
it. With a queue in the slot (``WeightQueue``) it is made later: until then its input is kept,
cut as it came under sequence parallelism and gathered then, and its output's gradient.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autograd_functions import OnceDifferentiable, cast_factor
from mcore_parallel.collectives import (
    reduce_from,
    reduce_scatter_to,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)
from mcore_parallel.grad_slot import GradSlot, slot_of
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.precision.fp8_between import CastBetween
from mcore_parallel.precision.gemm import PLAIN_GEMM, Gemm, Operands


def column_parallel(
    x: Float[Tensor, "s *B D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None,
    axis: Axis,
    sequence_parallel: bool,
    gemm: Gemm = PLAIN_GEMM,
    between: CastBetween | None = None,
) -> Float[Tensor, "S *B F"]:
    """Multiply by this rank's rows of a weight.

    Under sequence parallelism x is all-gathered along dimension 0 in forward, and gathered
    again in backward instead of being kept: the gather runs under the GEMM that gives the
    gradient of x, and the reduction of that gradient under the weight's.

    Args:
        x: whole input, or this rank's cut of dimension 0 under sequence parallelism.
        weight: this rank's rows.
        bias: this rank's entries, or None.
        axis: ranks that share the rows.
        sequence_parallel: whether x is cut along dimension 0 over ``axis``.
        gemm: multiplies.
        between: casts the result for the linear that follows, and its gradient for this one.
    """
    is_cut = sequence_parallel and axis.size > 1
    return _ColumnParallel.apply(x, weight, bias, axis, is_cut, gemm, between)


def row_parallel(
    x: Float[Tensor, "S *B _"],
    weight: Float[Tensor, "D f"],
    axis: Axis,
    sequence_parallel: bool,
    gemm: Gemm = PLAIN_GEMM,
    between: CastBetween | None = None,
) -> Float[Tensor, "s *B D"]:
    """Multiply by this rank's columns of a weight and sum over the ranks.

    Under sequence parallelism the sum is scattered along dimension 0, else every rank has it.

    Args:
        x: this rank's features.
        weight: this rank's columns.
        axis: ranks that share the columns.
        sequence_parallel: whether to cut the result along dimension 0 over ``axis``.
        gemm: multiplies.
        between: x is the output of the linear before, from which it computes the features.
    """
    if between is not None:
        partial = _Between.apply(x, weight, between)
    else:
        partial = column_parallel(x, weight, None, SINGLE, sequence_parallel=False, gemm=gemm)
    is_cut = sequence_parallel and axis.size > 1
    return reduce_scatter_to(partial, axis) if is_cut else reduce_from(partial, axis)


class _ColumnParallel(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        is_cut: bool,
        gemm: Gemm,
        between: CastBetween | None,
    ) -> Tensor:
        ctx.axis, ctx.is_cut, ctx.gemm, ctx.between = axis, is_cut, gemm, between
        # Saved tensors may come back as copies (recomputation); the slot is the original's.
        ctx.slot = slot_of(weight)
        x, weight = cast_factor(x), cast_factor(weight)
        bias = None if bias is None else cast_factor(bias)
        gathered = wait(start_all_gather(x, axis)) if is_cut else x
        y, kept = gemm.forward(gathered, weight, bias)
        kept = (x,) if is_cut else kept
        ctx.save_for_backward(weight, *(kept if ctx.needs_input_grad[1] else ()))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, *kept = ctx.saved_tensors
        operands = ctx.gemm.prepare(grad) if ctx.between is None else ctx.between.take()
        work = _WeightGradient(
            ctx.gemm, ctx.slot, operands, tuple(kept), ctx.axis if ctx.is_cut else None
        )
        grad_x, grad_weight = _gradients(work, weight, ctx.axis, ctx.needs_input_grad)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


class _Between(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, between: CastBetween) -> Tensor:
        ctx.slot, ctx.between = slot_of(weight), between
        y, kept = between.second.forward(between.output(hidden), weight, None)
        is_kept = ctx.needs_input_grad[1] and not between.forgets
        ctx.save_for_backward(hidden, weight, *(kept if is_kept else ()))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, *kept = ctx.saved_tensors
        between, gemm = ctx.between, ctx.between.second
        if between.forgets and ctx.needs_input_grad[1]:
            kept = gemm.keep(between.output(hidden))
        work = _WeightGradient(gemm, ctx.slot, gemm.prepare(grad), tuple(kept), None)
        grad_x, grad_weight = _gradients(work, weight, SINGLE, ctx.needs_input_grad)
        return None if grad_x is None else between.put(hidden, grad_x), grad_weight, None


def _gradients(
    work: "_WeightGradient", weight: Tensor, axis: Axis, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Make the gradients of input and weight, their communication under the other's GEMM."""
    needs_x, needs_weight, *_ = needs
    is_cut = work.axis is not None
    queue = work.slot.queue if needs_weight and work.slot is not None else None
    makes_weight = needs_weight and queue is None
    if queue is not None:
        queue.put(work.make, prepare=work.gather)
    if makes_weight:
        work.gather()  # runs under the next GEMM
    grad_x = work.gemm.input_grad(work.grad, weight) if needs_x else None
    if makes_weight:
        work.wait()  # before the reduction starts: both use the axis' links
    if grad_x is not None and axis.size > 1:  # runs under the weight's GEMM
        reduce = start_reduce_scatter if is_cut else start_all_reduce
        grad_x = reduce(grad_x, axis)
    grad_weight = work.make() if makes_weight else None
    if grad_x is not None and axis.size > 1:
        grad_x = wait(grad_x)
    return grad_x, grad_weight


class _WeightGradient:
    """One weight's gradient, made now or later; holds its factors until then."""

    def __init__(
        self,
        gemm: Gemm,
        slot: GradSlot | None,
        grad: Operands,
        kept: Operands,
        axis: Axis | None,
    ) -> None:
        """Hold the factors; an axis says that the input is cut over it."""
        self.gemm, self.slot, self.grad, self.kept, self.axis = gemm, slot, grad, kept, axis

    def gather(self) -> None:
        """Begin to gather an input that is cut."""
        if self.axis is not None:
            self.kept = (start_all_gather(self.kept[0], self.axis),)

    def wait(self) -> None:
        """Wait for the gather."""
        if self.axis is not None:
            self.kept, self.axis = self.gemm.keep(wait(self.kept[0])), None

    def make(self) -> Tensor | None:
        """Add the gradient to the slot's main gradient, or return it."""
        self.wait()
        return self.gemm.weight_grad(self.grad, self.kept, self.slot)
