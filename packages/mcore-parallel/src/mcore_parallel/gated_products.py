"""A gated feed-forward pair whose activation is made inside its products.

Between the two linears of a gated layer stand gate and up, twice the inner width, and the
kernels that only read and write them. Here the first product writes the activated values
beside them in its epilogue, and the product that gives the gradient of the activated values
turns it into that of gate and up in its own. Gate and up of a channel lie side by side in
memory, in turns, so that one tile of the output holds both; weights stay as they are, all
gates before all ups. The activated values are not kept: backward makes them again on its way.

Which kernels do it is the caller's choice (``GatedKernels``); ``twin_kernels`` are plain
torch, on any device, and what the others are held to. Communication, main gradients and put
off weight gradients are those of ``tensor_products``.

Shazeer 2020, GLU variants improve transformer, arXiv:2002.05202.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.accumulation import accumulate_product, main_grad_of
from mcore_parallel.collectives import (
    reduce_from,
    reduce_scatter_to,
    start_all_gather,
    wait,
)
from mcore_parallel.mesh import Axis
from mcore_parallel.tensor_products import (
    GradientProducts,
    column_gradients,
    weight_gradient_or_later,
)
from mcore_parallel.tuned_products import multiply_rows


@dataclass(frozen=True, slots=True)
class GatedKernels:
    """Products of a gated pair over T tokens, D channels outside and F inside; no gradients."""

    widen: Callable[[Tensor, Tensor, bool], tuple[Tensor | None, Tensor]]
    """From input ``[T, D]``, first weight ``[2F, D]`` and whether gate and up are kept: gate
    and up in turns, ``[T, 2F]``, or None, and the activated values, ``[T, F]``."""
    narrow_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """From the output's gradient ``[T, D]``, the second weight ``[D, F]`` and gate and up in
    turns: their gradient, likewise, and the activated values again."""
    gradients: GradientProducts
    """Of the first linear, from the gradient of gate and up in turns."""


def gated_pair(
    x: Float[Tensor, "s *B D"],
    first: Float[Tensor, "F2 D"],
    second: Float[Tensor, "D F"],
    kernels: GatedKernels,
    axis: Axis,
    sequence_parallel: bool,
) -> Float[Tensor, "s *B D"]:
    """Widen, gate and narrow again, with this rank's share of the inner width.

    Communicates as ``column_parallel`` and then ``row_parallel`` do, without overlap.

    Args:
        x: whole input, or this rank's cut of dimension 0 under sequence parallelism.
        first: this rank's gates, then its ups.
        second: this rank's columns.
        kernels: which compute it.
        axis: ranks that share the width.
        sequence_parallel: whether x and the result are cut along dimension 0 over ``axis``.
    """
    is_cut = sequence_parallel and axis.size > 1
    needs_grad = any(t.requires_grad for t in (x, first, second))
    if torch.is_grad_enabled() and needs_grad:
        hidden, activated = _Widen.apply(x, first, kernels, axis, is_cut)
        partial = _Narrow.apply(hidden, activated, second, kernels)
    else:
        _, activated = _widen(x, first, kernels, axis, is_cut, keep=False)
        partial = multiply_rows(activated, second.t())
    return reduce_scatter_to(partial, axis) if is_cut else reduce_from(partial, axis)


def _widen(
    x: Tensor, weight: Tensor, kernels: GatedKernels, axis: Axis, is_cut: bool, keep: bool
) -> tuple[Tensor | None, Tensor]:
    x = wait(start_all_gather(x, axis)) if is_cut else x
    tokens = x.shape[:-1]
    hidden, activated = kernels.widen(x.reshape(-1, x.shape[-1]), weight, keep)
    hidden = None if hidden is None else hidden.view(*tokens, hidden.shape[-1])
    return hidden, activated.view(*tokens, activated.shape[-1])


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, kernels: GatedKernels, axis: Axis, is_cut: bool
    ) -> Any:
        ctx.axis, ctx.sequence_parallel, ctx.kernels = axis, is_cut, kernels
        ctx.save_for_backward(x, weight)
        ctx.parameter = None if main_grad_of(weight) is None else weight
        hidden, activated = _widen(x, weight, kernels, axis, is_cut, keep=True)
        ctx.mark_non_differentiable(activated)
        ctx.set_materialize_grads(False)  # else backward fills zeros for what has no gradient
        return hidden, activated

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> Any:
        return *column_gradients(ctx, grad, ctx.kernels.gradients), None, None, None


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, activated: Tensor, weight: Tensor, kernels: GatedKernels
    ) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(hidden, weight)
        ctx.parameter = None if main_grad_of(weight) is None else weight
        return multiply_rows(activated, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        grad, rows = grad.reshape(-1, grad.shape[-1]), hidden.view(-1, hidden.shape[-1])
        grad_hidden, activated = ctx.kernels.narrow_backward(grad, weight, rows)
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = weight_gradient_or_later(ctx.parameter, grad, activated)
        return grad_hidden.view(hidden.shape), None, grad_weight, None


def in_turns(x: Float[Tensor, "*T F2"]) -> Float[Tensor, "*T F2"]:
    """Put the halves of the last dimension in turns: all gates, all ups to gate, up, gate."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def one_after_the_other(x: Float[Tensor, "*T F2"]) -> Float[Tensor, "*T F2"]:
    """Undo ``in_turns``."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def twin_kernels(activation: Callable[[Tensor], Tensor]) -> GatedKernels:
    """Make the kernels of plain torch operations.

    Args:
        activation: elementwise, of the gate.
    """

    def activate(hidden: Tensor) -> Tensor:
        gate, up = hidden.unflatten(-1, (-1, 2)).unbind(-1)
        return activation(gate) * up

    def widen(x: Tensor, weight: Tensor, keep: bool) -> tuple[Tensor | None, Tensor]:
        hidden = in_turns(x @ weight.t())
        return hidden if keep else None, activate(hidden)

    def narrow_backward(grad: Tensor, weight: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            activated = activate(hidden)
            (grad_hidden,) = torch.autograd.grad(activated, hidden, grad @ weight)
        return grad_hidden, activated.detach()

    def of_input(grad: Tensor, weight: Tensor) -> Tensor:
        return one_after_the_other(grad) @ weight

    def of_weight(total: Tensor, grad: Tensor, x: Tensor, *, overwrite: bool = False) -> None:
        rows = one_after_the_other(grad.t()).t()
        accumulate_product(total, rows, x, overwrite=overwrite)

    return GatedKernels(widen, narrow_backward, GradientProducts(of_input, of_weight))
