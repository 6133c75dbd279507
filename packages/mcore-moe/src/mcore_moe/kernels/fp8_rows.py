"""Cast of rows to e4m3, each scaled by its largest magnitude: Triton kernel and reference."""

from collections.abc import Iterator
from typing import NamedTuple, no_type_check

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mcore_parallel.kernels.fp8_fine_cast import scaled_by_tops
from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave

FP8 = torch.float8_e4m3fn


_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(2.0**-100)


class Fp8Rows(NamedTuple):
    """Rows in fp8."""

    numbers: Shaped[Tensor, "*R D"]
    """Numbers in e4m3, before multiplication by the scale of their row."""
    scales: Float[Tensor, "*R 1"]
    """Scale of each row; float32, or float64 for float64 rows."""

    def wide(self) -> Float[Tensor, "*R D"]:
        """Return the rows dequantized, in the dtype of the scales."""
        return self.numbers.to(self.scales.dtype) * self.scales

    def select_rows(self, index: Int[Tensor, " Q"]) -> "Fp8Rows":
        """Return the rows at ``index``; a row must be a multiple of 8 bytes."""
        # index_select has no kernel for fp8, and moves int64 words faster than bytes.
        words = self.numbers.view(torch.int64).index_select(0, index)
        return Fp8Rows(words.view(self.numbers.dtype), self.scales.index_select(0, index))


@triton.jit
@no_type_check
def _factors(top):
    # The factor of a row and its inverse; NaN for a row with infinity. Rows of tiny numbers are
    # scaled as if their largest number were _SMALLEST, so that the factor stays finite.
    top = tl.maximum(top, _SMALLEST)
    is_finite = top < float("inf")
    largest = tl.zeros_like(top) + _LARGEST
    scale = tl.where(is_finite, tl.div_rn(largest, top), float("nan"))
    return scale, tl.where(is_finite, tl.div_rn(top, largest), float("nan"))


@triton.jit
@no_type_check
def _cast(x, numbers, scales, width, BLOCK: tl.constexpr):
    # One program: one row, read once, kept in registers between its maximum and its cast.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    part = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale, inverse = _factors(tl.max(tl.abs(part), 0))
    part = tl.clamp(part * scale, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(numbers + row * width + column, part.to(numbers.dtype.element_ty), mask=inside)
    tl.store(scales + row, inverse)


def cast_rows_plain(x: Float[Tensor, "*R D"]) -> Fp8Rows:
    """Compute ``cast_rows`` in plain torch."""
    x = x.detach()
    tops = x.abs().to(torch.promote_types(x.dtype, torch.float32)).amax(-1, keepdim=True)
    return Fp8Rows(*scaled_by_tops(x, tops, FP8, is_power=False))


def _samples(device: torch.device) -> Iterator[Sample]:
    yield Sample(3.0 * wave(2, 5, 48, device=device, dtype=torch.bfloat16))


@optional_kernel(
    "rows in fp8 by Triton",
    reference=cast_rows_plain,
    kind=lambda x: () if x.dtype == torch.bfloat16 else None,
    samples=_samples,
)
def cast_rows(x: Float[Tensor, "*R D"]) -> Fp8Rows:
    """Return rows cast to e4m3, each scaled by its largest magnitude.

    NaN remains NaN, and a row with infinity becomes NaN.

    Args:
        x: up to 65 536 columns.
    """
    x = x.detach().contiguous()
    numbers = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    if x.numel():
        block = triton.next_power_of_2(x.shape[-1])
        warps = min(16, max(1, block // 512))
        _cast[(scales.numel(),)](x, numbers, scales, x.shape[-1], block, num_warps=warps)
    return Fp8Rows(numbers, scales)
