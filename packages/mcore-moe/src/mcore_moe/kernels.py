"""Triton kernel between the two products of an expert: gated activation times row weight.

One read and one write of the rows, forward and backward, where plain torch makes six passes.
The weight's gradient is the sum over a row, made by one program in fixed order, so that
every run gives the same bits. The plain twin is ``experts.weighted_gated``; imported only
where tensors are on a GPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

_KINDS = {"silu": 0, "gelu_tanh": 1}
_BLOCK = 1024


@triton.jit
def _forward(x, weight, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside).to(tl.float32)
    if KIND == 0:
        active = gate * tl.sigmoid(gate)
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2.0 * inner)
    weighed = active * up * tl.load(weight + row).to(tl.float32)
    tl.store(out + row * width + column, weighed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x, weight, dy, dx, dweight, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    row_weight = tl.load(weight + row).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    kind = dx.dtype.element_ty
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < WIDTH
        gate = tl.load(x + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0)
        up = up.to(tl.float32)
        grad = tl.load(dy + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if KIND == 0:
            sigmoid = tl.sigmoid(gate)
            active = gate * sigmoid
            slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        else:
            inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
            sigmoid = tl.sigmoid(2.0 * inner)
            active = gate * sigmoid
            rise = 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
            slope = sigmoid + gate * sigmoid * (1.0 - sigmoid) * rise
        total += grad * active * up
        grad = grad * row_weight
        tl.store(dx + row * 2 * WIDTH + column, (grad * up * slope).to(kind), mask=inside)
        tl.store(dx + row * 2 * WIDTH + WIDTH + column, (grad * active).to(kind), mask=inside)
    tl.store(dweight + row, tl.sum(total, 0).to(dweight.dtype.element_ty))


class _WeightedGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kind = kind
        num_rows, width = x.shape[0], x.shape[1] // 2
        out = x.new_empty(num_rows, width)
        if num_rows:
            grid = (num_rows, triton.cdiv(width, _BLOCK))
            _forward[grid](x, weight, out, width, kind, _BLOCK, num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        num_rows, width = x.shape[0], x.shape[1] // 2
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        if num_rows:
            _backward[(num_rows,)](
                x, weight, dy.contiguous(), dx, dweight, width, ctx.kind, _BLOCK, num_warps=4
            )
        return dx, dweight, None


def fused_weighted_gated(
    x: Float[Tensor, "R F2"], weight: Float[Tensor, " R"], activation: str = "silu"
) -> Float[Tensor, "R F"]:
    """Return activation(gate) * up * weight for ``x`` = [gate; up] in its last dimension.

    Args:
        x: contiguous, on a GPU; computed in float32, returned in its own dtype.
        weight: of each row.
        activation: ``silu`` or ``gelu_tanh``.

    Raises:
        KeyError: for another activation.
    """
    return _WeightedGated.apply(x.contiguous(), weight.contiguous(), _KINDS[activation])
