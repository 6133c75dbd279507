"""Autograd functions of the linears: GEMMs with a split weight, and their communication.

Under sequence parallelism tokens are all-gathered before a column-parallel GEMM and
reduce-scattered after a row-parallel GEMM. The ``Gemm`` object multiplies; this module
communicates.

If a weight's ``GradSlot`` has a main gradient, backward adds the weight's gradient to it and
returns None to autograd. If the slot has a queue (``WeightQueue``), the gradient is computed
later: the queue holds the input (under sequence parallelism this rank's slice, gathered later)
and the gradient of the output until then.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable, cast_factor
from mcore_parallel.autograd.grad_slot import GradSlot, slot_of
from mcore_parallel.collectives import (
    reduce_from,
    reduce_scatter_to,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.precision.fp8 import Fp8Gemm
from mcore_parallel.precision.fp8_cast import DeferredMatrix
from mcore_parallel.precision.gemm import PLAIN_GEMM, Gemm, Operands

FusedActivation = Callable[[Tensor, Tensor | None], DeferredMatrix]
"""``f(y, None)`` maps the first linear's output y to the second linear's input; ``f(y, grad)``
maps the gradient of that input to the gradient of y."""


def column_parallel(
    x: Float[Tensor, "s *B D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None,
    axis: Axis,
    sequence_parallel: bool,
    gemm: Gemm = PLAIN_GEMM,
) -> Float[Tensor, "S *B F"]:
    """Return ``x W^T + b`` for this rank's rows of W and entries of b.

    Under sequence parallelism forward all-gathers x along dimension 0, and backward gathers x
    again, so that the gathered tensor is not saved. In backward this gather overlaps with the
    GEMM of the gradient of x, and the reduction of that gradient with the GEMM of the weight's
    gradient.

    Args:
        x: input; under sequence parallelism this rank's slice of dimension 0.
        weight: this rank's rows.
        bias: this rank's entries, or None.
        axis: ranks that split the rows.
        sequence_parallel: whether x is split along dimension 0 over ``axis``.
        gemm: multiplies, in its precision.
    """
    is_cut = sequence_parallel and axis.size > 1
    return _ColumnParallel.apply(x, weight, bias, axis, is_cut, gemm)


def row_parallel(
    x: Float[Tensor, "S *B _"],
    weight: Float[Tensor, "D f"],
    axis: Axis,
    sequence_parallel: bool,
    gemm: Gemm = PLAIN_GEMM,
) -> Float[Tensor, "s *B D"]:
    """Return ``x W^T`` summed over the ranks that split the columns of W.

    Under sequence parallelism a reduce-scatter along dimension 0, else an all-reduce.

    Args:
        x: this rank's features.
        weight: this rank's columns.
        axis: ranks that split the columns.
        sequence_parallel: whether to split the result along dimension 0 over ``axis``.
        gemm: multiplies, in its precision.
    """
    partial = column_parallel(x, weight, None, SINGLE, sequence_parallel=False, gemm=gemm)
    return _sum_over(axis, partial, sequence_parallel)


def column_row_pair(
    x: Float[Tensor, "s *B D"],
    weights: tuple[Float[Tensor, "F D"], Float[Tensor, "D f"]],
    gemms: tuple[Fp8Gemm, Fp8Gemm],
    activation: FusedActivation,
    axis: Axis,
    sequence_parallel: bool,
    *,
    recompute_activation: bool = False,
) -> Float[Tensor, "s *B D"]:
    """Return ``activation(x W1^T) W2^T`` with both GEMMs in fp8, as one autograd function.

    The cast for the second GEMM computes the activation, and the cast for the first GEMM's
    backward computes the activation's gradient, so neither is stored in 16 bits. Communicates
    as ``column_parallel`` followed by ``row_parallel``.

    Args:
        x: input; under sequence parallelism this rank's slice of dimension 0.
        weights: this rank's rows of the first weight and columns of the second.
        gemms: fp8 GEMMs of the two linears; both accept a ``DeferredMatrix``.
        activation: function between the two linears.
        axis: ranks that split the inner features.
        sequence_parallel: whether x and the result are split along dimension 0 over ``axis``.
        recompute_activation: recompute the activation for the second weight's gradient instead
            of saving its cast.
    """
    is_cut = sequence_parallel and axis.size > 1
    partial = _ColumnRowPair.apply(
        x, *weights, axis, is_cut, gemms, activation, recompute_activation
    )
    return _sum_over(axis, partial, sequence_parallel)


def _sum_over(
    axis: Axis, partial: Float[Tensor, "S *B D"], sequence_parallel: bool
) -> Float[Tensor, "s *B D"]:
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
    ) -> Tensor:
        ctx.axis, ctx.is_cut, ctx.gemm = axis, is_cut, gemm
        # Read from the original weight: a saved tensor may be unpacked as a copy without slot.
        ctx.slot = slot_of(weight)
        x, weight = cast_factor(x), cast_factor(weight)
        bias = None if bias is None else cast_factor(bias)
        gathered = wait(start_all_gather(x, axis), axis) if is_cut else x
        y, kept = gemm.forward(gathered, weight, bias)
        kept = (x,) if is_cut else kept
        ctx.save_for_backward(weight, *(kept if ctx.needs_input_grad[1] else ()))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, *kept = ctx.saved_tensors
        cut_over = ctx.axis if ctx.is_cut else None
        work = _WeightGradient(
            ctx.gemm, ctx.slot, ctx.gemm.prepare(grad), tuple(kept), cut_over
        )
        grad_x, grad_weight = _gradients(work, weight, ctx.axis, ctx.needs_input_grad)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None


class _ColumnRowPair(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        column_weight: Tensor,
        row_weight: Tensor,
        axis: Axis,
        is_cut: bool,
        gemms: tuple[Fp8Gemm, Fp8Gemm],
        activation: FusedActivation,
        recompute_activation: bool,
    ) -> Tensor:
        ctx.axis, ctx.is_cut, ctx.gemms, ctx.activation = axis, is_cut, gemms, activation
        # Read from the original weights: a saved tensor may be unpacked as a copy without slot.
        ctx.slots = slot_of(column_weight), slot_of(row_weight)
        column, row = gemms
        gathered = wait(start_all_gather(x, axis), axis) if is_cut else x
        hidden, column_kept = column.forward(gathered, column_weight, None)
        y, row_kept = row.forward(activation(hidden, None), row_weight, None)
        # Saved for the weights' gradients: the first input (this rank's slice, or the cast of
        # the full input), and the cast activation unless backward recomputes it.
        ctx.recompute_activation = recompute_activation
        column_kept = (x,) if is_cut else column_kept
        row_kept = () if recompute_activation else row_kept
        ctx.num_column_kept = len(column_kept)
        ctx.save_for_backward(hidden, column_weight, row_weight, *column_kept, *row_kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, column_weight, row_weight, *kept = ctx.saved_tensors
        needs_x, needs_column, needs_row, *_ = ctx.needs_input_grad
        (column, row), (column_slot, row_slot) = ctx.gemms, ctx.slots
        column_kept, row_kept = kept[: ctx.num_column_kept], kept[ctx.num_column_kept :]
        if ctx.recompute_activation and needs_row:
            row_kept = row.keep(ctx.activation(hidden, None))
        work = _WeightGradient(row, row_slot, row.prepare(grad), tuple(row_kept), None)
        grad_active, grad_row = _gradients(work, row_weight, SINGLE, (True, needs_row))
        # From here on as in _ColumnParallel; the cast computes the activation's gradient.
        operands = column.prepare(ctx.activation(hidden, grad_active))
        cut_over = ctx.axis if ctx.is_cut else None
        work = _WeightGradient(column, column_slot, operands, tuple(column_kept), cut_over)
        needs = needs_x, needs_column
        grad_x, grad_column = _gradients(work, column_weight, ctx.axis, needs)
        return grad_x, grad_column, grad_row, None, None, None, None, None


def _gradients(
    work: "_WeightGradient", weight: Tensor, axis: Axis, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and weight; collectives overlap with the two GEMMs.

    gather of x | GEMM of grad x, then reduction of grad x | GEMM of grad weight.
    """
    needs_x, needs_weight, *_ = needs
    is_cut = work.axis is not None
    queue = work.slot.queue if needs_weight and work.slot is not None else None
    makes_weight = needs_weight and queue is None
    if queue is not None:
        queue.put(work.make, prepare=work.gather)
    if makes_weight:
        work.gather()  # overlaps with the next GEMM
    grad_x = work.gemm.input_grad(work.grad, weight) if needs_x else None
    if makes_weight:
        work.wait()  # before the reduction starts, which uses the same links
    if grad_x is not None and axis.size > 1:  # overlaps with the weight's GEMM
        reduce = start_reduce_scatter if is_cut else start_all_reduce
        grad_x = reduce(grad_x, axis)
    grad_weight = None
    if makes_weight:  # ``work.make`` without its wait
        grad_weight = work.gemm.weight_grad(work.grad, work.kept, work.slot)
    if grad_x is not None and axis.size > 1:
        grad_x = wait(grad_x, axis)
    return grad_x, grad_weight


class _WeightGradient:
    """One weight's gradient, computed now or later, and its two factors until then."""

    def __init__(
        self,
        gemm: Gemm,
        slot: GradSlot | None,
        grad: Operands,
        kept: Operands,
        axis: Axis | None,
    ) -> None:
        """Store the factors.

        Args:
            gemm: multiplies the factors.
            slot: slot of the weight; None: ``make`` returns the gradient.
            grad: gradient of the output, as ``gemm.prepare`` returns it.
            kept: the input, as ``gemm.keep`` returns it, or this rank's slice of the input.
            axis: ranks over which the input is split; None: ``kept`` is the full input.
        """
        self.gemm, self.slot, self.grad, self.kept, self.axis = gemm, slot, grad, kept, axis

    def gather(self) -> None:
        """Launch the all-gather of a split input."""
        if self.axis is not None:
            self.kept = (start_all_gather(self.kept[0], self.axis),)

    def wait(self) -> None:
        """Wait for the all-gather."""
        if self.axis is not None:
            self.kept, self.axis = self.gemm.keep(wait(self.kept[0], self.axis)), None

    def make(self) -> Tensor | None:
        """Add the gradient to the slot's main gradient, or return the gradient."""
        self.wait()
        return self.gemm.weight_grad(self.grad, self.kept, self.slot)
