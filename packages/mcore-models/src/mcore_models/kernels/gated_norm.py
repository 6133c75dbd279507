"""RMSNorm with a gate, by groups of channels: Triton kernels and reference.

``norm(y * silu(z)) * weight``, or with the gate last: ``norm(y) * weight * silu(z)``.
A row is read once in forward and once in backward. A program of backward loops over many rows
of a group and keeps its share of the weight's gradient in registers; the shares are summed in a
fixed order.
"""

from collections.abc import Iterator
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.collectives import copy_to, reduce_from
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.optional_kernels import (
    Sample,
    optional_kernel,
    sine_leaf,
    tl,
    triton,
)

WIDEST = 8192
"""Largest group that the kernels support: a row is held in one program's registers."""
_PROGRAMS, _WIDE = 528, 2048
"""Programs of the backward pass, each over many rows; groups narrower than ``_WIDE`` have
more."""


@triton.jit
@no_type_check
def _forward(
    y, z, z_row, weight, out, scales, width, size, epsilon,
    GATES_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < size
    channel = group * size + column
    gate = tl.load(z + row * z_row + channel, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(y + row * width + channel, mask=inside, other=0.0).to(tl.float32)
    gate *= tl.sigmoid(gate)
    if GATES_FIRST:
        value *= gate
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + epsilon)
    tl.store(scales + row * tl.num_programs(1) + group, scale)
    factor = tl.load(weight + channel, mask=inside, other=0.0)
    if GATES_FIRST:
        normed = (value * scale).to(out.dtype.element_ty) * factor
    else:
        normed = value * scale * factor * gate
    tl.store(out + row * width + channel, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _backward(
    y, z, z_row, weight, scales, dout, dy, dz, parts, rows, width, size,
    GATES_FIRST: tl.constexpr, BLOCK: tl.constexpr,
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
        # silu(z) = z * sigmoid(z), whose slope is sigmoid(z) * (1 + z * (1 - sigmoid(z))).
        share = tl.sigmoid(gate)
        scale = tl.load(scales + row * tl.num_programs(1) + group)
        slope = share * (1 + gate * (1 - share))
        gate *= share
        normed = value * scale
        if GATES_FIRST:
            normed *= gate
        else:
            dgate = grad * normed * factor
            grad *= gate
        dweight += grad * normed
        grad *= factor
        # Of n = v * rsqrt(mean(v^2) + epsilon): dv = (dn - n * mean(dn * n)) * scale.
        grad = (grad - normed * (tl.sum(grad * normed, 0) / size)) * scale
        if GATES_FIRST:
            dgate = grad * value
            grad *= gate
        at = row * width + channel
        tl.store(dy + at, grad.to(dy.dtype.element_ty), mask=inside)
        tl.store(dz + at, (dgate * slope).to(dz.dtype.element_ty), mask=inside)
    tl.store(parts + program * width + channel, dweight, mask=inside)


class _GatedNorm(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        z: Tensor,
        weight: Tensor,
        size: int,
        epsilon: float,
        gates_first: bool,
    ) -> Tensor:
        rows, width = y.shape
        groups = width // size
        out = torch.empty_like(y)
        scales = y.new_empty((rows, groups), dtype=torch.float32)
        block = triton.next_power_of_2(size)
        ctx.options: dict[str, Any] = {"BLOCK": block, "GATES_FIRST": gates_first}
        ctx.options["num_warps"] = min(16, max(1, block // 512))
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
        total_programs = _PROGRAMS * max(1, _WIDE // ctx.options["BLOCK"])
        programs = min(rows, max(1, total_programs // groups))
        parts = y.new_empty((programs, width), dtype=torch.float32)
        grads = dout.contiguous(), dy, dz, parts
        _backward[(programs, groups)](
            y, z, z.stride(0), weight, scales, *grads, *ctx.sizes, **ctx.options
        )
        return dy, dz, parts.sum(0).to(weight.dtype), None, None, None


def _plain(
    y: Float[Tensor, "*B F"],
    z: Float[Tensor, "*B F"],
    weight: Float[Tensor, " F"],
    *,
    group_size: int,
    epsilon: float,
    gates_first: bool = True,
    holders: Axis = SINGLE,
) -> Float[Tensor, "*B F"]:
    wide = torch.promote_types(y.dtype, torch.float32)
    gate = F.silu(z.to(wide))
    gated = y.to(wide) * gate if gates_first else y.to(wide)
    blocks = gated.unflatten(-1, (-1, group_size // holders.size))
    squares = blocks.square().sum(-1, keepdim=True)
    # Every holder's output depends on the squares of all holders: sum in forward and backward.
    squares = copy_to(reduce_from(squares, holders), holders)
    normed = blocks * torch.rsqrt(squares / group_size + epsilon)
    if gates_first:
        return weight * normed.flatten(-2).to(y.dtype)
    return (weight * normed.flatten(-2) * gate).to(y.dtype)


def _kind(y: Tensor, group_size: int, holders: Axis) -> tuple[torch.dtype] | None:
    is_fit = y.dtype != torch.float64 and group_size <= WIDEST and holders.size == 1
    return (y.dtype,) if is_fit else None


def _samples(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[Sample]:
    shapes = (9, 2, 80), (9, 2, 80), (80,)
    inputs = [sine_leaf(*shape, device=device, dtype=dtype) for shape in shapes]
    for gates_first in (True, False):
        yield Sample(*inputs, group_size=40, epsilon=1e-5, gates_first=gates_first)


@optional_kernel("a gated norm in Triton", reference=_plain, kind=_kind, samples=_samples)
def gated_norm(
    y: Float[Tensor, "*B F"],
    z: Float[Tensor, "*B F"],
    weight: Float[Tensor, " F"],
    *,
    group_size: int,
    epsilon: float,
    gates_first: bool = True,
    holders: Axis = SINGLE,  # noqa: ARG001 - the reference reduces
) -> Float[Tensor, "*B F"]:
    """Return ``norm(y * silu(z)) * weight``, or ``norm(y) * weight * silu(z)``.

    RMSNorm of each group of neighbouring channels. Statistics are float32 or wider.

    Args:
        y: outputs, contiguous for the kernel's speed.
        z: gates.
        weight: of each channel.
        group_size: channels of a group, over all holders.
        epsilon: added to the mean square.
        gates_first: whether the output is gated before it is normed, or after.
        holders: ranks that share each group; sums of squares are all-reduced over them in
            forward and backward, by the reference.
    """
    flat = z.reshape(-1, z.shape[-1])
    rows = flat if flat.stride(1) == 1 else flat.contiguous()
    inputs = y.contiguous().flatten(0, -2), rows, weight
    return _GatedNorm.apply(*inputs, group_size, epsilon, gates_first).view(y.shape)
