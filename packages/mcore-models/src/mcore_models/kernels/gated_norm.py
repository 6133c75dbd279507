"""Triton kernels of ``norm(y * silu(z)) * weight`` by groups of channels, forward and backward.

A row is read once in forward and once in backward. A program of backward walks over many rows
of a group and keeps its part of the weight's gradient in registers; the parts are summed in a
fixed order. The plain form is ``layers.recurrent.gated_norm.GatedNorm.plain``.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

_PROGRAMS = 528
"""Of the backward pass, each over many rows."""


@triton.jit
@no_type_check
def _forward(
    y, z, z_row, weight, out, scales, width, size, epsilon, BLOCK: tl.constexpr
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < size
    channel = group * size + column
    gate = tl.load(z + row * z_row + channel, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(y + row * width + channel, mask=inside, other=0.0).to(tl.float32)
    value *= gate * tl.sigmoid(gate)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + epsilon)
    tl.store(scales + row * tl.num_programs(1) + group, scale)
    normed = (value * scale).to(out.dtype.element_ty)
    normed *= tl.load(weight + channel, mask=inside, other=0.0)
    tl.store(out + row * width + channel, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _backward(
    y, z, z_row, weight, scales, dout, dy, dz, parts, rows, width, size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < size
    channel = group * size + column
    factor = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        gate = tl.load(z + row * z_row + channel, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(y + row * width + channel, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dout + row * width + channel, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        scale = tl.load(scales + row * tl.num_programs(1) + group)
        normed = value * gate * share * scale
        dweight += grad * normed
        grad *= factor
        grad = (grad - normed * (tl.sum(grad * normed, 0) / size)) * scale
        at = row * width + channel
        tl.store(dy + at, (grad * gate * share).to(dy.dtype.element_ty), mask=inside)
        grad *= value * share * (1 + gate * (1 - share))
        tl.store(dz + at, grad.to(dz.dtype.element_ty), mask=inside)
    tl.store(parts + program * width + channel, dweight, mask=inside)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, z: Tensor, weight: Tensor, size: int, epsilon: float
    ) -> Tensor:
        rows, width = y.shape
        groups = width // size
        out = torch.empty_like(y)
        scales = y.new_empty((rows, groups), dtype=torch.float32)
        block = triton.next_power_of_2(size)
        ctx.options = {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
        ctx.sizes = rows, width, size
        _forward[(rows, groups)](
            y, z, z.stride(0), weight, out, scales, width, size, epsilon, **ctx.options
        )
        ctx.save_for_backward(y, z, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        y, z, weight, scales = ctx.saved_tensors
        rows, width, size = ctx.sizes
        groups = width // size
        dy = torch.empty_like(y)
        dz = torch.empty_like(y)
        programs = min(rows, max(1, _PROGRAMS // groups))
        parts = y.new_empty((programs, width), dtype=torch.float32)
        grads = dout.contiguous(), dy, dz, parts
        _backward[(programs, groups)](
            y, z, z.stride(0), weight, scales, *grads, *ctx.sizes, **ctx.options
        )
        return dy, dz, parts.sum(0).to(weight.dtype), None, None


def fused_gated_norm(
    y: Float[Tensor, "S B F"],
    z: Float[Tensor, "S B F"],
    weight: Float[Tensor, " F"],
    *,
    group_size: int,
    epsilon: float,
) -> Float[Tensor, "S B F"]:
    """Gate, then norm each group of ``group_size`` neighbouring channels."""
    flat = z.reshape(-1, z.shape[-1])
    rows = flat if flat.stride(1) == 1 else flat.contiguous()
    found = _GatedNorm.apply(y.contiguous().flatten(0, 1), rows, weight, group_size, epsilon)
    return found.view(y.shape)
