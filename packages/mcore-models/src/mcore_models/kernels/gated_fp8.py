"""Triton kernels that compute a gated activation, or its gradient, and cast it to fp8.

One program reads a tile of gate and up-projection, and in backward one of the output's
gradient; it rounds what it computes to the tensor's own dtype and casts it as
``mcore_parallel.kernels.fp8_cast`` does, in both orders. Without outputs it only finds the
largest magnitude. The bits are those of ``mcore_moe.kernels.gate`` and that cast in turn.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from mcore_moe.kernels.gate import KINDS, activate
from mcore_parallel.precision.fp8_cast import SMALLEST_AMAX, Fp8

_ROWS, _COLUMNS, _WARPS = 64, 64, 8


@triton.jit
@no_type_check
def _note(value, seen):
    """Raise ``seen`` to the largest magnitude of a 16-bit tile; return it."""
    # Bits of non-negative floats are ordered as the floats are, infinity and NaN on top.
    bits = value.to(tl.int16, bitcast=True) & 0x7FFF
    size: tl.constexpr = value.shape[0] * value.shape[1]
    most = tl.max(tl.reshape(bits, [size], can_reorder=True), 0).to(tl.int16)
    most = most.to(value.dtype, bitcast=True).to(tl.float32)
    tl.atomic_max(seen, most.to(tl.int32, bitcast=True), sem="relaxed")
    return most


@triton.jit
@no_type_check
def _scale(amax, scale_inv, LIMIT: tl.constexpr, SMALLEST: tl.constexpr):
    """Return what multiplies a matrix of this magnitude; one program stores its inverse."""
    top = tl.load(amax)
    is_finite = top < float("inf")  # false for NaN
    top = tl.maximum(top, SMALLEST)
    limit = tl.full([], LIMIT, tl.float32)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, tl.where(is_finite, tl.div_rn(top, limit), float("nan")))
    return tl.where(is_finite, tl.div_rn(limit, top), float("nan"))


@triton.jit
@no_type_check
def _write(
    value,
    scale,
    rows,
    columns,
    inside,
    LIMIT: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """Scale, clamp and cast a tile; store it at ``rows``, and its transpose at ``columns``."""
    value = value.to(tl.float32) * scale
    value = tl.maximum(value, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    value = tl.minimum(value, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if IS_E4M3:
        narrow = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        narrow = value.to(tl.float8e5).to(tl.uint8, bitcast=True)
    if HAS_ROWS:
        tl.store(rows, narrow, mask=inside)
    tl.store(columns, tl.trans(narrow), mask=tl.trans(inside))


@triton.jit
@no_type_check
def _gate_and_cast(
    x,
    grad,
    amax,
    seen,
    rows,
    columns,
    scale_inv,
    num_rows,
    width,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    IS_GRAD: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    WRITES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    wide = row[:, None] * (2 * width) + column[None, :]
    own = row[:, None] * width + column[None, :]
    turned = column[:, None] * num_rows + row[None, :]
    kind = x.dtype.element_ty
    gate = tl.load(x + wide, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + wide + width, mask=inside, other=0.0).to(tl.float32)
    active, slope = activate(gate, KIND)
    if IS_GRAD:
        dy = tl.load(grad + own, mask=inside, other=0.0).to(tl.float32)
        value, of_up = (dy * up * slope).to(kind), (dy * active).to(kind)
    else:
        value = (active * up).to(kind)
    most = 0.0
    if HAS_SEEN:
        most = _note(value, seen)
        if IS_GRAD:
            most = tl.maximum(most, _note(of_up, seen), propagate_nan=tl.PropagateNan.ALL)
    if WRITES:
        scale = _scale(amax, scale_inv, LIMIT, SMALLEST)
        if HAS_SEEN:
            # The scale is of other numbers than these, so it says nothing of them.
            scale = tl.where(most < float("inf"), scale, float("nan"))
        if IS_GRAD:
            below = columns + width.to(tl.int64) * num_rows
            at, under = rows + wide, rows + wide + width
            _write(value, scale, at, columns + turned, inside, LIMIT, IS_E4M3, HAS_ROWS)
            _write(of_up, scale, under, below + turned, inside, LIMIT, IS_E4M3, HAS_ROWS)
        else:
            at = rows + own
            _write(value, scale, at, columns + turned, inside, LIMIT, IS_E4M3, HAS_ROWS)


def largest(
    x: Float[Tensor, "T F2"], grad: Float[Tensor, "T F"] | None, activation: str
) -> Float[Tensor, " 1"]:
    """Return the largest magnitude of the output, or of x's gradient; NaN if there is one."""
    seen = torch.zeros(1, dtype=torch.float32, device=x.device)
    none = torch.empty(0, 0, dtype=torch.uint8, device=x.device)
    _launch(x, grad, seen, seen, (none, none, seen), activation, torch.float8_e4m3fn)
    return seen


def cast_by(
    x: Float[Tensor, "T F2"],
    grad: Float[Tensor, "T F"] | None,
    activation: str,
    amax: Float[Tensor, " 1"],
    dtype: torch.dtype,
    *,
    has_rows: bool = True,
    seen: Float[Tensor, " 1"] | None = None,
) -> Fp8:
    """Cast activation(gate) * up, or with ``grad`` the gradient of x.

    Args:
        x: gate and up-projection, contiguous, 16 bits.
        grad: of the output.
        activation: see ``mcore_moe.kernels.gate.KINDS``.
        amax: the magnitude that becomes the format's largest number.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        has_rows: whether to write the matrix in its own order, not only its transpose.
        seen: float32, 0 or above; raised in place to the largest magnitude. What is not
            finite is then NaN, and its neighbours in the kernel's tile with it.
    """
    num_rows, width = x.shape[0], x.shape[1] // (1 if grad is not None else 2)
    shapes = (num_rows, width) if has_rows else (0, 0), (width, num_rows)
    rows, columns = (torch.empty(s, dtype=torch.uint8, device=x.device) for s in shapes)
    outputs = rows, columns, torch.empty(1, dtype=torch.float32, device=x.device)
    _launch(x, grad, amax, seen, outputs, activation, dtype)
    return Fp8(rows.view(dtype), columns.view(dtype), outputs[2])


def _launch(
    x: Tensor,
    grad: Tensor | None,
    amax: Tensor,
    seen: Tensor | None,
    outputs: tuple[Tensor, Tensor, Tensor],
    activation: str,
    dtype: torch.dtype,
) -> None:
    num_rows, width = x.shape[0], x.shape[1] // 2
    grid = triton.cdiv(num_rows, _ROWS), triton.cdiv(width, _COLUMNS)
    _gate_and_cast[grid](
        x,
        x if grad is None else grad,
        amax,
        (amax if seen is None else seen).view(torch.int32),
        *outputs,
        num_rows,
        width,
        KINDS[activation],
        torch.finfo(dtype).max,
        SMALLEST_AMAX,
        grad is not None,
        dtype == torch.float8_e4m3fn,
        seen is not None,
        outputs[1].numel() > 0,
        outputs[0].numel() > 0,
        _ROWS,
        _COLUMNS,
        num_warps=_WARPS,
    )
