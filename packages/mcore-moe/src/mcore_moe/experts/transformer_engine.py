"""GEMMs of experts by Transformer Engine's grouped GEMM (the extra ``te`` of mcore-models).

The host waits for the number of rows of every expert, which are host integers in that GEMM.
"""

from functools import partial
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable, cast_factor
from mcore_parallel.autograd.grad_slot import slot_of


def transformer_engine_linear(
    x: Float[Tensor, "R K"], weight: Float[Tensor, "e N K"], offsets: Int[Tensor, " e1"]
) -> Float[Tensor, "R N"]:
    """Multiply each expert's rows with its weight; see ``grouped_gemm.sequential_linear``.

    Backward adds the weight's gradient to its main gradient, if there is one.
    """
    return _Grouped.apply(x, weight, offsets)


class _Grouped(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        # Saved tensors may be copies, without a slot: take the slot from the original.
        ctx.slot = slot_of(weight)
        x, weight = cast_factor(x), cast_factor(weight)
        ctx.sizes = offsets.diff().tolist()
        ctx.save_for_backward(x, weight)
        y = x.new_zeros(x.shape[0], weight.shape[1])  # rows of no expert stay zero
        _multiply(weight, x, ctx.sizes, y, "TN")
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad, grad_x, grad_weight = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_x = torch.zeros_like(x)
            _multiply(weight, grad, ctx.sizes, grad_x, "NN")
        if ctx.needs_input_grad[1]:
            add = partial(_add_weight_gradient, grad=grad, x=x, sizes=ctx.sizes)
            if ctx.slot is None:
                grad_weight = torch.empty_like(weight)
                add(grad_weight, overwrite=True)
            else:
                ctx.slot.take(add)
        return grad_x, grad_weight, None


def _multiply(
    weight: Float[Tensor, "e N K"],
    x: Float[Tensor, "R _"],
    sizes: list[int],
    out: Float[Tensor, "R _"],
    layout: str,
) -> None:
    """Write the result of each expert's GEMM to its rows of ``out``."""
    active = [expert for expert, size in enumerate(sizes) if size]  # experts with rows
    if not active:
        return
    rows = x[: sum(sizes)].split(sizes)
    _grouped_gemm(
        [weight[expert] for expert in active],
        [rows[expert] for expert in active],
        [out],
        layout,
        m_splits=[sizes[expert] for expert in active],
        single_output=True,
        grad=layout != "TN",
    )


def _add_weight_gradient(
    total: Float[Tensor, "e N K"], grad: Tensor, x: Tensor, sizes: list[int], *, overwrite: bool
) -> None:
    """Add the weight gradient of every expert that has rows to ``total``, in place."""
    if overwrite:
        total.zero_()
    active = [expert for expert, size in enumerate(sizes) if size]  # experts with rows
    if not active:
        return
    by_expert = (t[: sum(sizes)].split(sizes) for t in (x, grad))
    inputs, grads = ([parts[expert] for expert in active] for parts in by_expert)
    out = [total[expert] for expert in active]
    counts = [sizes[expert] for expert in active]
    _grouped_gemm(inputs, grads, out, "NT", m_splits=counts, grad=True, accumulate=True)


def _grouped_gemm(
    a: list[Tensor], b: list[Tensor], out: list[Tensor], layout: str, **options: Any
) -> None:
    """Multiply pairs of matrices into ``out`` with the options of TE's grouped linear."""
    grouped = import_module("transformer_engine.pytorch.cpp_extensions").general_grouped_gemm
    split = layout != "TN"
    none, dtype = [None] * len(a), out[0].dtype
    grouped(a, b, out, none, dtype, layout=layout, use_split_accumulator=split, **options)
