"""Products with a weight split over the tensor ranks: the functional core of the linears.

Under sequence parallelism tokens are gathered before a column-parallel GEMM and summed and
scattered behind a row-parallel one.

Every weight gradient of the linears is made in ``weight_gradient``: into ``main_grad`` by
the GEMM itself where the data-parallel wrapper set one, else handed to autograd. A weight
with a ``weight_queue`` (``pipeline.WeightQueue``) has it made later: until then its input is
kept, cut as it came under sequence parallelism and gathered then, and its output's gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autocasting import cast_factor
from mcore_parallel.collectives import (
    reduce_from,
    reduce_scatter_to,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.tensor_parallel.grad_accumulation import (
    add_product,
    main_grad_of,
    tell_ready,
)


def column_parallel(
    x: Float[Tensor, "s *B D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None,
    axis: Axis,
    sequence_parallel: bool,
) -> Float[Tensor, "S *B F"]:
    """Multiply by this rank's rows of a weight.

    Under sequence parallelism x is all-gathered along dimension 0 in forward, and gathered
    again in backward instead of being kept: the gather runs under the product that gives the
    gradient of x, and the reduction of that gradient under the weight's.

    Args:
        x: whole input, or this rank's cut of dimension 0 under sequence parallelism.
        weight: this rank's rows.
        bias: this rank's entries, or None.
        axis: ranks that share the rows.
        sequence_parallel: whether x is cut along dimension 0 over ``axis``.
    """
    return _ColumnParallel.apply(x, weight, bias, axis, sequence_parallel and axis.size > 1)


def row_parallel(
    x: Float[Tensor, "S *B f"],
    weight: Float[Tensor, "D f"],
    axis: Axis,
    sequence_parallel: bool,
) -> Float[Tensor, "s *B D"]:
    """Multiply by this rank's columns of a weight and sum over the ranks.

    Under sequence parallelism the sum is scattered along dimension 0, else every rank has it.

    Args:
        x: this rank's features.
        weight: this rank's columns.
        axis: ranks that share the columns.
        sequence_parallel: whether to cut the result along dimension 0 over ``axis``.
    """
    partial = column_parallel(x, weight, None, SINGLE, sequence_parallel=False)
    is_cut = sequence_parallel and axis.size > 1
    return reduce_scatter_to(partial, axis) if is_cut else reduce_from(partial, axis)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        # Saved tensors may come back as copies (recomputation); main_grad sits on the original.
        ctx.parameter = None if main_grad_of(weight) is None else weight
        x, weight = cast_factor(x), cast_factor(weight)
        bias = None if bias is None else cast_factor(bias)
        ctx.save_for_backward(x, weight)
        gathered = wait(start_all_gather(x, axis)) if sequence_parallel else x
        return F.linear(gathered, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_x, grad_weight = _column_gradients(ctx, grad)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None


def _column_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Make the gradients of a column-parallel GEMM's input and weight."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, *_ = ctx.needs_input_grad
    axis, sequence_parallel = ctx.axis, ctx.sequence_parallel
    queue = getattr(ctx.parameter, "weight_queue", None)
    if needs_weight and queue is not None:
        cut = axis if sequence_parallel else SINGLE
        later = _LaterGradient(ctx.parameter, grad, x, cut)
        queue.put(later.make, prepare=later.gather)
    makes_weight = needs_weight and queue is None
    if makes_weight and sequence_parallel:
        x = start_all_gather(x, axis)  # runs under the next product
    grad_x = grad @ weight if needs_x else None
    if makes_weight and sequence_parallel:
        x = wait(x)
    if grad_x is not None and axis.size > 1:  # runs under the weight's product
        reduce = start_reduce_scatter if sequence_parallel else start_all_reduce
        grad_x = reduce(grad_x, axis)
    grad_weight = weight_gradient(ctx.parameter, grad, x) if makes_weight else None
    if grad_x is not None and axis.size > 1:
        grad_x = wait(grad_x)
    return grad_x, grad_weight


class _LaterGradient:
    """A weight gradient put off; holds its factors until it is made."""

    def __init__(self, parameter: Tensor, grad: Tensor, x: Tensor, axis: Axis = SINGLE) -> None:
        """Keep what ``weight_gradient`` wants, and the axis that cuts the input."""
        self.parameter, self.grad, self.x, self.axis = parameter, grad, x, axis

    def gather(self) -> None:
        """Begin to gather the input over the axis that cuts it."""
        self.x = start_all_gather(self.x, self.axis)

    def make(self) -> None:
        """Add the gradient to ``main_grad``."""
        x = self.x if self.axis.size == 1 else wait(self.x)
        weight_gradient(self.parameter, self.grad, x)


def weight_gradient(
    parameter: Any, grad: Float[Tensor, "S *B F"], x: Float[Tensor, "S *B D"]
) -> Float[Tensor, "F D"] | None:
    """Make the gradient of a weight from those of its output and its input.

    Args:
        parameter: the weight where it carries ``main_grad``, else None. The gradient is added
            to that, ``main_grad_ready`` is called if it is there too, and None is returned.
        grad: gradient of the output.
        x: the input, gathered.
    """
    rows, x = grad.flatten(0, -2).t(), x.flatten(0, -2)
    if parameter is not None:
        add_product(parameter, rows, x)
        tell_ready(parameter)
        return None
    return rows @ x
