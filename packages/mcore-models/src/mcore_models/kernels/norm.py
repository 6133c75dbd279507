"""A norm combined with the residual addition before it: Triton kernels and references.

A block adds a branch to the residual stream and norms the sum. Forward reads stream and branch
once and writes the sum and the normed sum. Backward reads the sum and the gradients of both
outputs, and writes one gradient, which is equal for stream and branch. A program of backward
loops over many rows and keeps its share of the weight's gradient in registers; the shares are
summed in a fixed order, into the main gradient if the weight has one.
"""

from collections.abc import Iterator
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.autograd.grad_slot import slot_of
from mcore_parallel.optional_kernels import (
    Sample,
    optional_kernel,
    sine_leaf,
    tl,
    triton,
)

NARROWEST, WIDEST = 256, 16384
"""Widths that the kernels support: a row is held in one program's registers."""
_PROGRAMS_PER_PROCESSOR = 3
"""Programs of the backward pass, each over many rows; 3 of 4 warps fit on a processor."""


@triton.jit
@no_type_check
def _forward(
    x,
    branch,
    weight,
    bias,
    total,
    out,
    means,
    scales,
    width,
    offset,
    epsilon,
    HAS_BRANCH: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    value = tl.load(x + at, mask=inside, other=0.0)
    if HAS_BRANCH:
        value = value.to(tl.float32) + tl.load(branch + at, mask=inside, other=0.0)
        value = value.to(x.dtype.element_ty)  # norm the sum as the stream stores it: rounded
        tl.store(total + at, value, mask=inside)
    value = value.to(tl.float32)
    if CENTERED:
        mean = tl.sum(value, 0) / width
        tl.store(means + row, mean)
        value = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + epsilon)
    tl.store(scales + row, scale)
    result = value * scale * (tl.load(weight + column, mask=inside).to(tl.float32) + offset)
    if CENTERED:
        result += tl.load(bias + column, mask=inside).to(tl.float32)
    tl.store(out + at, result.to(x.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _backward(
    total,
    weight,
    means,
    scales,
    dout,
    dtotal,
    dx,
    weight_parts,
    bias_parts,
    rows,
    width,
    offset,
    HAS_DTOTAL: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = row * width + column
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
        passed = tl.zeros([BLOCK], tl.float32)
        if HAS_DTOTAL:  # loaded early, together with the others
            passed = tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        if CENTERED:
            value = tl.where(inside, value - tl.load(means + row), 0.0)
        normed = value * scale
        dweight += grad * normed
        grad_normed = tl.where(inside, grad * factor, 0.0)
        # With n the normed value: dx = scale * (dn - n * mean(dn * n)); a LayerNorm also
        # subtracts mean(dn).
        result = grad_normed - normed * (tl.sum(grad_normed * normed, 0) / width)
        if CENTERED:
            dbias += grad
            result -= tl.sum(grad_normed, 0) / width
        result *= scale
        if HAS_DTOTAL:
            result += passed
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)
    tl.store(weight_parts + program * width + column, dweight, mask=inside)
    if CENTERED:
        tl.store(bias_parts + program * width + column, dbias, mask=inside)


@triton.jit
@no_type_check
def _sum_parts(
    parts, out, count, width, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    result = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, count, ROWS):
        row = begin + tl.arange(0, ROWS)
        result += tl.load(
            parts + row[:, None] * width + column[None, :],
            mask=(row < count)[:, None] & inside[None, :],
            other=0.0,
        )
    summed = tl.sum(result, 0)
    if ADD:
        summed += tl.load(out + column, mask=inside).to(tl.float32)
    tl.store(out + column, summed.to(out.dtype.element_ty), mask=inside)


class _AddAndNorm(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        offset: float,
    ) -> tuple[Tensor, ...]:
        width = x.shape[-1]
        num_rows = x.numel() // width
        total = x if branch is None else torch.empty_like(x)
        out = torch.empty_like(x)
        scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        means = scales if bias is None else torch.empty_like(scales)
        block = triton.next_power_of_2(width)
        if num_rows:
            _forward[(num_rows,)](
                x,
                x if branch is None else branch,
                weight,
                weight if bias is None else bias,
                total,
                out,
                means,
                scales,
                width,
                offset,
                epsilon,
                branch is not None,
                bias is not None,
                block,
                num_warps=_num_warps(block),
            )
        ctx.save_for_backward(total, weight, means, scales)
        ctx.offset, ctx.has_branch = offset, branch is not None
        # Saved tensors may be copies (recomputation), without a slot: keep the originals.
        ctx.parameters = (weight, bias)
        ctx.set_materialize_grads(False)
        return (out,) if branch is None else (out, total)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *others: Tensor | None) -> Any:
        total, weight, means, scales = ctx.saved_tensors
        dtotal = others[0] if ctx.has_branch else None
        if dout is None:
            return dtotal, dtotal if ctx.has_branch else None, *[None] * 4
        width = total.shape[-1]
        num_rows = total.numel() // width
        block = triton.next_power_of_2(width)
        programs = min(num_rows, _num_processors(total.device) * _PROGRAMS_PER_PROCESSOR)
        centered = ctx.parameters[1] is not None
        dx = torch.empty_like(total)
        parts = total.new_empty(1 + centered, programs, width, dtype=torch.float32)
        if num_rows:
            _backward[(programs,)](
                total,
                weight,
                means,
                scales,
                dout.contiguous(),
                total if dtotal is None else dtotal.contiguous(),
                dx,
                parts[0],
                parts[-1],
                num_rows,
                width,
                ctx.offset,
                dtotal is not None,
                centered,
                block,
                num_warps=max(1, _num_warps(block) // 2),
            )
        grads = [
            _parameter_gradient(parameter, part)
            for parameter, part in zip(ctx.parameters, parts, strict=False)
        ]
        dbranch = dx if ctx.has_branch else None
        return dx, dbranch, grads[0], grads[1] if centered else None, None, None


def _parameter_gradient(parameter: Tensor, parts: Tensor) -> Tensor | None:
    """Sum the programs' shares into the main gradient and return None, or return the sum."""
    if not parameter.requires_grad:
        return None
    slot = slot_of(parameter)
    out = torch.empty_like(parameter) if slot is None else slot.main
    count, width = parts.shape
    block = 32
    _sum_parts[(triton.cdiv(width, block),)](
        parts, out, count, width, slot is not None, 64, block, num_warps=8
    )
    if slot is None:
        return out
    slot.ready()
    return None


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 512))


def _num_processors(device: torch.device) -> int:
    if device.type == "cpu":  # interpreted
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _norm_plain(
    x: Float[Tensor, "*B D"],
    weight: Float[Tensor, " D"],
    bias: Float[Tensor, " D"] | None,
    *,
    epsilon: float,
    offset: float = 0.0,
) -> Float[Tensor, "*B D"]:
    weight = weight + offset if offset else weight
    wide = x.to(torch.promote_types(x.dtype, weight.dtype))  # they differ under autocast
    if bias is None:
        return F.rms_norm(wide, weight.shape, weight, epsilon).to(x.dtype)
    return F.layer_norm(wide, weight.shape, weight, bias, epsilon).to(x.dtype)


def _add_and_norm_plain(
    x: Float[Tensor, "*B D"],
    branch: Float[Tensor, "*B D"],
    weight: Float[Tensor, " D"],
    bias: Float[Tensor, " D"] | None,
    *,
    epsilon: float,
    offset: float = 0.0,
) -> tuple[Float[Tensor, "*B D"], Float[Tensor, "*B D"]]:
    total = x + branch
    return _norm_plain(total, weight, bias, epsilon=epsilon, offset=offset), total


def _kind(x: Tensor) -> tuple[torch.dtype] | None:
    is_fit = x.dtype != torch.float64 and NARROWEST <= x.shape[-1] <= WIDEST
    return (x.dtype,) if is_fit else None


def _samples(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[Sample]:
    x, weight, bias = (
        sine_leaf(*shape, device=device, dtype=dtype)
        for shape in ((2, NARROWEST), (NARROWEST,), (NARROWEST,))
    )
    yield Sample(x, weight, bias, epsilon=1e-5)


def _add_samples(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[Sample]:
    for sample in _samples(device, dtype):
        x, *parameters = sample.args
        branch = x.detach().flip(0).requires_grad_()
        yield Sample(x, branch, *parameters, **sample.kwargs)


@optional_kernel("norms in Triton", reference=_norm_plain, kind=_kind, samples=_samples)
def norm(
    x: Float[Tensor, "*B D"],
    weight: Float[Tensor, " D"],
    bias: Float[Tensor, " D"] | None,
    *,
    epsilon: float,
    offset: float = 0.0,
) -> Float[Tensor, "*B D"]:
    """Return the norm of the last dimension: LayerNorm with a bias, RMSNorm without one.

    Args:
        x: any dtype; the result has the same dtype. Statistics are float32 or wider.
        weight: of the norm. Backward adds to its main gradient, if there is one.
        bias: of a LayerNorm; as the weight.
        epsilon: added to the mean square.
        offset: added to the weight.
    """
    (out,) = _AddAndNorm.apply(x.contiguous(), None, weight, bias, epsilon, offset)
    return out


@optional_kernel(
    "norms with an addition in Triton",
    reference=_add_and_norm_plain,
    kind=_kind,
    samples=_add_samples,
)
def add_and_norm(
    x: Float[Tensor, "*B D"],
    branch: Float[Tensor, "*B D"],
    weight: Float[Tensor, " D"],
    bias: Float[Tensor, " D"] | None,
    *,
    epsilon: float,
    offset: float = 0.0,
) -> tuple[Float[Tensor, "*B D"], Float[Tensor, "*B D"]]:
    """Return the norm of ``x + branch`` and the sum, which is rounded first; see ``norm``."""
    return _AddAndNorm.apply(x.contiguous(), branch.contiguous(), weight, bias, epsilon, offset)
