"""Casting a matrix to fp8 with one scale, of the matrix itself or known before.

A largest magnitude becomes the largest number of the format: 448 in e4m3, 57344 in e5m2.
Values are clamped before they are cast, since torch's casts do not saturate. A matrix of zeros
stays zero. One with infinity or NaN becomes NaN, and its scale too, so that every product with
it is NaN: as loud as in 16 bits, where clamping would hide it. Where the scale was known
before, only the numbers that are not finite become NaN.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.optional_kernels import OptionalKernel, wave, works

SMALLEST_AMAX = 2.0**-100
"""Below it a matrix is scaled as if this were its largest magnitude."""


class Fp8(NamedTuple):
    """A matrix in fp8, in both orders."""

    rows: Shaped[Tensor, "T D"]
    """Empty where only the transpose was wanted."""
    columns: Shaped[Tensor, "D T"]
    """The transpose, contiguous: tensor cores read both factors along the summed dimension."""
    scale_inv: Float[Tensor, " 1"]
    """Multiplies either to give the matrix back; float32, float64 for a float64 matrix."""


class DeferredMatrix(ABC):
    """A matrix that is computed while it is cast, so that it is never stored in 16 bits.

    Subclasses give the reference (``make``) and may override ``largest`` and ``cast`` with a
    kernel that computes and casts in one pass.
    """

    def __init__(self, shape: torch.Size) -> None:
        """Compute nothing.

        Args:
            shape: of the tensor; its last dimension is the matrix' second.
        """
        self.shape = shape
        self._made: Tensor | None = None

    @abstractmethod
    def make(self) -> Float[Tensor, "..."]:
        """Return it, in the dtype that its numbers are rounded to before the cast."""

    def largest(self) -> Float[Tensor, " 1"]:
        """Return the largest magnitude; see ``largest_magnitude``."""
        return largest_magnitude(self._matrix())

    def cast(
        self,
        amax: Float[Tensor, " 1"],
        dtype: torch.dtype,
        *,
        has_rows: bool,
        seen: Float[Tensor, " 1"] | None,
    ) -> Fp8:
        """Cast by a known magnitude; see ``cast``."""
        return cast(self._matrix(), dtype, has_rows=has_rows, amax=amax, seen=seen)

    def _matrix(self) -> Float[Tensor, "T D"]:
        if self._made is None:
            self._made = self.make().detach().flatten(0, -2).contiguous()
        return self._made


def cast(
    x: Float[Tensor, "T D"] | DeferredMatrix,
    dtype: torch.dtype,
    axis: Axis = SINGLE,
    *,
    has_rows: bool = True,
    amax: Float[Tensor, " 1"] | None = None,
    seen: Float[Tensor, " 1"] | None = None,
) -> Fp8:
    """Cast a matrix to fp8; without ``amax`` all-reduces its largest magnitude over ``axis``.

    By two kernels on a GPU, else by ``cast_plain``'s arithmetic: the same bits.

    Args:
        x: floating, any memory order; or a matrix that the cast computes.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        axis: ranks that hold other parts of the same logical matrix and share its scale.
        has_rows: whether to give the matrix in its own order, not only the transpose.
        amax: what becomes the format's largest number; None: the largest magnitude of all
            ranks.
        seen: float32; raised in place to this matrix' own largest magnitude.
    """
    if isinstance(x, Tensor):
        x = x.detach().contiguous()
    if amax is None:
        own = largest_magnitude(x) if isinstance(x, Tensor) else x.largest()
        if seen is not None:
            seen.copy_(torch.maximum(seen, own))
            seen = None
        amax = all_reduce(own, axis, "max")
    if not isinstance(x, Tensor):
        return x.cast(amax, dtype, has_rows=has_rows, seen=seen)
    if _has_kernel(x) and x.shape[0] % 4 == 0:  # the transpose is written in words of 4
        from mcore_parallel.kernels.fp8_cast import cast_by

        return Fp8(*cast_by(x, amax, dtype, has_rows=has_rows, seen=seen))
    if seen is not None:
        seen.copy_(torch.maximum(seen, _largest_plain(x)))
    whole = cast_plain(x, amax, dtype)
    return whole if has_rows else whole._replace(rows=whole.rows.new_empty(0, 0))


def cast_plain(x: Float[Tensor, "T D"], amax: Float[Tensor, " 1"], dtype: torch.dtype) -> Fp8:
    """Cast a matrix with a known largest magnitude, in torch: the reference of the kernel."""
    rows, scale_inv = cast_rows(x, amax, dtype)
    return Fp8(rows, rows.t().contiguous(), scale_inv)


def cast_rows(
    x: Float[Tensor, "..."], amax: Float[Tensor, " 1"], dtype: torch.dtype
) -> tuple[Shaped[Tensor, "..."], Float[Tensor, " 1"]]:
    """Cast a tensor as ``cast_plain`` does; return it in its own order, and what undoes it."""
    limit = torch.finfo(dtype).max
    wide = torch.promote_types(x.dtype, torch.float32)
    floor = amax.to(wide).clamp(min=SMALLEST_AMAX)
    # By tensors: torch divides a number, and by a number, through a rounded reciprocal.
    top = torch.full_like(floor, limit)
    scale, scale_inv = (
        torch.where(amax.isfinite(), s, float("nan")) for s in (top / floor, floor / top)
    )
    scaled = torch.where(x.isfinite(), x, float("nan")).to(wide) * scale
    return scaled.clamp(-limit, limit).to(dtype), scale_inv


def cast_flat(
    x: Float[Tensor, " T"], amax: Float[Tensor, " 1"], out: Shaped[Tensor, " T"]
) -> None:
    """Cast as ``cast_rows`` does into ``out``, whose dtype is that of the format.

    By a kernel on a GPU, to the same bits.
    """
    if _has_kernel(x):
        from mcore_parallel.kernels.fp8_cast import narrow

        narrow(x, amax, out)
    else:
        out.copy_(cast_rows(x, amax, out.dtype)[0])


def dequantize_flat(
    fp8: Shaped[Tensor, " T"], amax: Float[Tensor, " 1"], out: Float[Tensor, " T"]
) -> None:
    """Write into ``out`` what ``cast_flat`` made of other memory by the same magnitude."""
    if _has_kernel(out):
        from mcore_parallel.kernels.fp8_cast import widen

        widen(fp8, amax, out)
    else:
        _, scale_inv = cast_rows(amax.new_zeros(1), amax, fp8.dtype)
        out.copy_(dequantized(fp8, scale_inv))


def dequantized(
    fp8: Shaped[Tensor, "*T"], scale_inv: Float[Tensor, " 1"]
) -> Float[Tensor, "*T"]:
    """Return what a cast tensor stands for, in the dtype of its scale."""
    return fp8.to(scale_inv.dtype) * scale_inv


def largest_magnitude(x: Float[Tensor, "T D"]) -> Float[Tensor, " 1"]:
    """Return the largest magnitude of a contiguous matrix; NaN if there is one.

    By the kernel on a GPU; in float32, or float64 for a float64 matrix.
    """
    if _has_kernel(x):
        from mcore_parallel.kernels.fp8_cast import largest

        return largest(x)
    return _largest_plain(x)


def _largest_plain(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.abs().amax().to(wide).view(1)  # NaN stays


def _has_kernel(x: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype != torch.float64
        and not torch.compiler.is_compiling()
        and works(CAST_KERNEL, x.device, x.dtype)
    )


def _try_cast(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Cast by the kernels and in torch, both formats; a trial of ``CAST_KERNEL``."""
    from mcore_parallel.kernels import fp8_cast as kernels

    x = 3.0 * wave(160, 272, device=device, dtype=dtype)
    amax = _largest_plain(x)
    yield kernels.largest(x), amax
    for narrow in (torch.float8_e4m3fn, torch.float8_e5m2):
        want = cast_plain(x, amax, narrow)
        for got, expected in zip(kernels.cast_by(x, amax, narrow), want, strict=True):
            yield got.float(), expected.float()
        flat, back = torch.empty_like(want.rows).view(-1), torch.empty_like(x).view(-1)
        kernels.narrow(x.view(-1), amax, flat)
        yield flat.float(), want.rows.float().view(-1)
        kernels.widen(flat, amax, back)
        yield back, dequantized(want.rows, want.scale_inv).view(-1).to(dtype)


CAST_KERNEL = OptionalKernel("the fp8 casts", ("triton",), _try_cast)
"""What ``cast`` takes where it works."""
