"""``activation(gate) * up`` between the GEMMs of a gated layer: Triton kernels and references.

Experts also multiply each row by its weight. Forward and backward read and write the rows
once, at the limit of memory bandwidth; plain torch makes six passes. One program sums the
gradient of a row's weight in a fixed order, so every run gives the same bits.
"""

from collections.abc import Iterator
from typing import Any, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_moe.activations import activation_function
from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.optional_kernels import (
    Sample,
    optional_kernel,
    sine_leaf,
    tl,
    triton,
)

KINDS = {"silu": 0, "gelu_tanh": 1}
"""Activations that the kernels support, and their numbers in the kernels."""
_WIDEST = 1024  # columns of one program
_MOST_ROWS = 1024  # programs in the grid's first dimension if only the device has ``end``


@triton.jit
@no_type_check
def activate(gate, KIND: tl.constexpr):
    """Return the activation of a gate and the activation's derivative."""
    if KIND == 0:
        # silu(g) = g * sigmoid(g)
        sigmoid = tl.sigmoid(gate)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    else:
        # gelu(g) = g / 2 * (1 + tanh(i)) = g * sigmoid(2 i),
        # with i = sqrt(2 / pi) * (g + 0.044715 g^3)
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        sigmoid = tl.sigmoid(2.0 * inner)
        rise = 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
        slope = sigmoid + gate * sigmoid * (1.0 - sigmoid) * rise
    return gate * sigmoid, slope


@triton.jit
@no_type_check
def _forward(
    x,
    weight,
    end,
    out,
    width,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # With weights the host does not have the number of rows: a fixed number of programs loops
    # over the rows up to ``end``, which is on the device.
    stop = tl.load(end) if WEIGHTED else tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    for number in range(tl.program_id(0), stop, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        gate = tl.load(x + row * 2 * width + column, mask=inside).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=inside).to(tl.float32)
        active, _ = activate(gate, KIND)
        result = active * up
        if WEIGHTED:
            result *= tl.load(weight + row).to(tl.float32)
        tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _backward(
    x,
    weight,
    end,
    dy,
    dx,
    dweight,
    width,
    span,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: ``span`` columns of a row; with weights the complete row, over which the
    # weight's gradient is summed.
    row = tl.program_id(0).to(tl.int64)
    if WEIGHTED:  # noqa: SIM102 - decided by the compiler, the other by the device
        if row >= tl.load(end):
            return
    first = tl.program_id(1) * span
    kind = dx.dtype.element_ty
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(first, tl.minimum(first + span, width), BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0)
        up = up.to(tl.float32)
        grad = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
        active, slope = activate(gate, KIND)
        if WEIGHTED:
            total += grad * active * up
            grad *= tl.load(weight + row).to(tl.float32)
        tl.store(dx + row * 2 * width + column, (grad * up * slope).to(kind), mask=inside)
        tl.store(dx + row * 2 * width + width + column, (grad * active).to(kind), mask=inside)
    if WEIGHTED:
        tl.store(dweight + row, tl.sum(total, 0).to(dweight.dtype.element_ty))


class _Gated(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, end: Tensor | None, kind: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight, end)
        ctx.kind = kind
        width = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], width)
        if out.numel():
            block, num_warps = _block(width)
            is_weighted, num_rows = weight is not None, out.numel() // width
            num_programs = min(num_rows, _MOST_ROWS) if is_weighted else num_rows
            _forward[(num_programs, triton.cdiv(width, block))](
                x,
                weight if is_weighted else x,
                end if is_weighted else x,
                out,
                width,
                kind,
                is_weighted,
                block,
                num_warps=num_warps,
            )
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, end = ctx.saved_tensors
        width = x.shape[-1] // 2
        is_weighted = weight is not None
        dx = torch.empty_like(x)
        dweight = torch.empty_like(weight) if is_weighted else None
        if x.numel():
            block, num_warps = _block(width)
            span = width if is_weighted else block
            _backward[(x.numel() // (2 * width), triton.cdiv(width, span))](
                x,
                weight if is_weighted else x,
                end if is_weighted else x,
                dy.contiguous(),
                dx,
                dweight if is_weighted else dx,
                width,
                span,
                ctx.kind,
                is_weighted,
                block,
                num_warps=num_warps,
            )
        return dx, dweight, None, None


def _block(width: int) -> tuple[int, int]:
    """Return the columns and the warps of one program; a thread loads 16 bytes at once."""
    block = min(_WIDEST, 1 << (width - 1).bit_length())
    return block, max(1, block // 256)


def _gated_plain(
    x: Float[Tensor, "*B F2"], activation: str, clamp: float = 0.0, offset: float = 0.0
) -> Float[Tensor, "*B F"]:
    gate, up = x.chunk(2, -1)
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return activation_function(activation)(gate) * (up + offset if offset else up)


def _weighted_gated_plain(
    x: Float[Tensor, "R F2"],
    probs: Float[Tensor, " R"],
    end: Int[Tensor, ""],  # noqa: ARG001 - later rows are computed too
    activation: str,
    clamp: float = 0.0,
    offset: float = 0.0,
) -> Float[Tensor, "R F"]:
    hidden = _gated_plain(x, activation, clamp, offset)
    return (hidden * probs[:, None]).to(x.dtype)


def _kind(x: Tensor, activation: str, clamp: float, offset: float) -> tuple[torch.dtype] | None:
    is_plain = bool(clamp or offset) or activation not in KINDS or x.dtype == torch.float64
    return None if is_plain else (x.dtype,)


def _samples(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[Sample]:
    for activation in KINDS:
        yield Sample(sine_leaf(3, 32, device=device, dtype=dtype), activation)


def _weighted_samples(
    device: torch.device, dtype: torch.dtype = torch.float32
) -> Iterator[Sample]:
    x, probs = (sine_leaf(*shape, device=device, dtype=dtype) for shape in ((3, 32), (3,)))
    end = torch.tensor(3, dtype=torch.int32, device=device)
    for activation in KINDS:
        yield Sample(x, probs, end, activation)


@optional_kernel(
    "gated activations in Triton", reference=_gated_plain, kind=_kind, samples=_samples
)
def gated(
    x: Float[Tensor, "*B F2"],
    activation: str,
    clamp: float = 0.0,  # noqa: ARG001 - the reference bounds
    offset: float = 0.0,  # noqa: ARG001 - the reference adds
) -> Float[Tensor, "*B F"]:
    """Return the activated first half of the channels times the second half.

    Args:
        x: gate and up-projection; the kernel computes in float32.
        activation: a key of ``ACTIVATIONS``; kernels compute those of ``KINDS``.
        clamp: bounds gates from above and up-projections on both sides; 0: no bound.
        offset: added to up-projections. Only the reference supports clamp and offset.

    Reference:
        Shazeer 2020, GLU variants improve transformer, arXiv:2002.05202. Clamp and offset are
        those of gpt-oss: OpenAI 2025, arXiv:2508.10925.
    """
    return _Gated.apply(x.contiguous(), None, None, KINDS[activation])


@optional_kernel(
    "weighted gated activations in Triton",
    reference=_weighted_gated_plain,
    kind=_kind,
    samples=_weighted_samples,
)
def weighted_gated(
    x: Float[Tensor, "R F2"],
    probs: Float[Tensor, " R"],
    end: Int[Tensor, ""],
    activation: str,
    clamp: float = 0.0,  # noqa: ARG001 - the reference bounds
    offset: float = 0.0,  # noqa: ARG001 - the reference adds
) -> Float[Tensor, "R F"]:
    """Return ``gated`` times the weight of each row.

    Args:
        x: gate and up-projection of each row.
        probs: weight of each row.
        end: number of rows in use, on the device. Results and gradients of later rows are
            undefined.
        activation: as in ``gated``.
        clamp: as in ``gated``.
        offset: as in ``gated``.
    """
    return _Gated.apply(x.contiguous(), probs.contiguous(), end, KINDS[activation])
