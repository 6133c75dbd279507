"""A gated activation, or its gradient, computed and cast to fp8: Triton kernels and references.

One program reads a tile of gate and up-projection, and in backward a tile of the output's
gradient. It rounds the result to the tensor's dtype and casts it as
``mcore_parallel.kernels.fp8_cast`` does, to the matrix and its transpose. Another kernel
computes the largest magnitude by rows. The result has the same bits as
``mcore_moe.kernels.gate`` followed by that cast.
"""

from collections.abc import Iterator
from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_moe.activations import activation_function
from mcore_moe.kernels.gate import KINDS, activate
from mcore_parallel.kernels.fp8_cast import SMALLEST_AMAX, Fp8, cast_by
from mcore_parallel.kernels.fp8_tiles import (
    empty_outputs,
    load_quarters,
    magnitude_bits,
    one_scale,
    raised,
    store_both,
)
from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave

_TILES = (16, 128, 8), (16, 64, 4)
"""Words of the transpose, columns and warps of a program, for outputs and for gradients."""
_LANES, _LANE_WARPS = 2048, 8
"""Columns and warps of a program that computes the largest magnitude of a row."""


@triton.jit
@no_type_check
def _rounded(gate, up, KIND: tl.constexpr):
    active, _ = activate(gate.to(tl.float32), KIND)
    return (active * up.to(tl.float32)).to(gate.dtype)


@triton.jit
@no_type_check
def _rounded_grads(gate, up, dy, KIND: tl.constexpr):
    active, slope = activate(gate.to(tl.float32), KIND)
    dy = dy.to(tl.float32)
    return (dy * up.to(tl.float32) * slope).to(gate.dtype), (dy * active).to(gate.dtype)


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
    HAS_ROWS: tl.constexpr,
    COMPILED: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (word < num_rows // 4)[:, None] & (column < width)[None, :]
    gate_a, gate_b, gate_c, gate_d = load_quarters(x, word, column, 2 * width, inside)
    up_a, up_b, up_c, up_d = load_quarters(x, word, column + width, 2 * width, inside)
    scale = one_scale(amax, scale_inv, LIMIT, SMALLEST)
    if IS_GRAD:
        dy_a, dy_b, dy_c, dy_d = load_quarters(grad, word, column, width, inside)
        a, up_a = _rounded_grads(gate_a, up_a, dy_a, KIND)
        b, up_b = _rounded_grads(gate_b, up_b, dy_b, KIND)
        c, up_c = _rounded_grads(gate_c, up_c, dy_c, KIND)
        d, up_d = _rounded_grads(gate_d, up_d, dy_d, KIND)
    else:
        a, b = _rounded(gate_a, up_a, KIND), _rounded(gate_b, up_b, KIND)
        c, d = _rounded(gate_c, up_c, KIND), _rounded(gate_d, up_d, KIND)
    stride = 2 * width if IS_GRAD else width
    store_both(
        rows, columns, a, b, c, d, scale, seen, word, column, stride, num_rows,
        IS_E4M3, HAS_ROWS, HAS_SEEN, COMPILED, inside,
    )  # fmt: skip
    if IS_GRAD:
        store_both(
            rows, columns, up_a, up_b, up_c, up_d, scale, seen, word, column + width, stride,
            num_rows, IS_E4M3, HAS_ROWS, HAS_SEEN, COMPILED, inside,
        )  # fmt: skip


@triton.jit
@no_type_check
def _gate_and_note(
    x, grad, seen, width, KIND: tl.constexpr, IS_GRAD: tl.constexpr, LANES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([LANES], tl.int16)
    for begin in range(0, width, LANES):
        column = begin + tl.arange(0, LANES)
        inside = column < width
        at = x + row * 2 * width + column
        gate = tl.load(at, mask=inside, other=0.0)
        up = tl.load(at + width, mask=inside, other=0.0)
        if IS_GRAD:
            dy = tl.load(grad + row * width + column, mask=inside, other=0.0)
            value, of_up = _rounded_grads(gate, up, dy, KIND)
            most = tl.maximum(most, magnitude_bits(of_up))
        else:
            value = _rounded(gate, up, KIND)
        most = tl.maximum(most, magnitude_bits(value))
    raised(seen, most, x.dtype.element_ty)


def gate_reference(
    x: Float[Tensor, "T F2"], grad: Float[Tensor, "T F"] | None, activation: str
) -> Float[Tensor, "T _"]:
    """Return activation(gate) * up, or with ``grad`` the gradient of x, rounded to x's dtype.

    Computed in float32 without optional kernels, since a kernel's trial must not start another.
    """
    leaf = x.detach().float().requires_grad_()
    with torch.enable_grad():
        gate, up = leaf.chunk(2, -1)
        y = activation_function(activation)(gate) * up
        if grad is not None:
            y = torch.autograd.grad(y, leaf, grad.float())[0]
    return y.detach().to(x.dtype)


def _largest_plain(
    x: Float[Tensor, "T F2"], grad: Float[Tensor, "T F"] | None, activation: str
) -> Float[Tensor, " 1"]:
    return gate_reference(x, grad, activation).abs().amax().float().view(1)


def _cast_plain(
    x: Float[Tensor, "T F2"],
    grad: Float[Tensor, "T F"] | None,
    activation: str,
    amax: Float[Tensor, " 1"],
    dtype: torch.dtype,
    *,
    has_rows: bool = True,
    seen: Float[Tensor, " 1"] | None = None,
) -> Fp8:
    matrix = gate_reference(x, grad, activation)
    return cast_by.reference(matrix, amax, dtype, has_rows=has_rows, seen=seen)


def _kind(x: Tensor) -> tuple[torch.dtype] | None:
    return (x.dtype,) if x.dtype in (torch.bfloat16, torch.float16) else None


def _largest_samples(
    device: torch.device, dtype: torch.dtype = torch.float16
) -> Iterator[Sample]:
    x, grad = (3.0 * wave(96, n, device=device, dtype=dtype) for n in (160, 80))
    for activation in KINDS:
        yield Sample(x, None, activation)
        yield Sample(x, grad, activation)


def _cast_samples(device: torch.device, dtype: torch.dtype = torch.float16) -> Iterator[Sample]:
    for sample in _largest_samples(device, dtype):
        narrow = torch.float8_e4m3fn if sample.args[1] is None else torch.float8_e5m2
        yield Sample(*sample.args, _largest_plain(*sample.args), narrow)


@optional_kernel(
    "largest magnitudes of gated activations",
    reference=_largest_plain,
    kind=_kind,
    samples=_largest_samples,
)
def largest_gated(
    x: Float[Tensor, "T F2"], grad: Float[Tensor, "T F"] | None, activation: str
) -> Float[Tensor, " 1"]:
    """Return the largest magnitude of the output, or of x's gradient; NaN if any is NaN."""
    seen = torch.zeros(1, dtype=torch.int32, device=x.device)
    _gate_and_note[(x.shape[0],)](
        x,
        x if grad is None else grad,
        seen,
        x.shape[1] // 2,
        KINDS[activation],
        grad is not None,
        _LANES,
        num_warps=_LANE_WARPS,
    )
    return seen.view(torch.float32)


@optional_kernel(
    "gated activations cast to fp8",
    reference=_cast_plain,
    kind=lambda x: None if x.shape[0] % 4 else _kind(x),
    samples=_cast_samples,
)
def cast_gated(
    x: Float[Tensor, "T F2"],
    grad: Float[Tensor, "T F"] | None,
    activation: str,
    amax: Float[Tensor, " 1"],
    dtype: torch.dtype,
    *,
    has_rows: bool = True,
    seen: Float[Tensor, " 1"] | None = None,
) -> Fp8:
    """Return activation(gate) * up in fp8, or with ``grad`` the gradient of x in fp8.

    Args:
        x: gate and up-projection, contiguous, 16 bits; T is a multiple of 4.
        grad: of the output.
        activation: see ``mcore_moe.kernels.gate.KINDS``.
        amax: the magnitude that is scaled to the format's largest number.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        has_rows: whether to write the matrix in addition to its transpose.
        seen: float32, 0 or above; raised in place to the largest magnitude. A value that is not
            finite makes ``seen`` NaN, and also its neighbours in the kernel's tile.
    """
    num_rows, width = x.shape[0], x.shape[1] // 2
    wide = width if grad is None else 2 * width
    rows, columns, scale_inv = empty_outputs(num_rows, wide, x.device, has_rows=has_rows)
    words, across, warps = _TILES[grad is not None]
    _gate_and_cast[triton.cdiv(num_rows, 4 * words), triton.cdiv(width, across)](
        x,
        x if grad is None else grad,
        amax,
        (amax if seen is None else seen).view(torch.int32),
        rows,
        columns,
        scale_inv,
        num_rows,
        width,
        KINDS[activation],
        torch.finfo(dtype).max,
        SMALLEST_AMAX,
        grad is not None,
        dtype == torch.float8_e4m3fn,
        seen is not None,
        has_rows,
        x.is_cuda,
        words,
        across,
        num_warps=warps,
    )
    return Fp8(rows.view(dtype), columns.view(dtype), scale_inv)
