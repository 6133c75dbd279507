"""Recipes: how the operands of an fp8 GEMM are scaled, cast and multiplied.

``Tensorwise`` and ``Delayed`` use one scale per tensor, from the tensor itself or from earlier
steps. ``Rowwise`` uses one scale per row that a GEMM sums along, ``Blockwise`` one per 128
numbers of such a row (128 x 128 of a weight), as DeepSeek-V3. Finer scales extend the range for
tensors with outliers; they do not add precision.

Reference:
    Micikevicius et al. 2022, FP8 Formats for Deep Learning. arXiv:2209.05433.
    DeepSeek-AI 2024, DeepSeek-V3 Technical Report, 3.3. arXiv:2412.19437.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_parallel.autograd.functions import without_autocast
from mcore_parallel.autograd.grad_slot import GradSlot
from mcore_parallel.kernels.fp8_cast import Fp8, dequantized
from mcore_parallel.kernels.fp8_fine_cast import (
    BLOCK,
    FineFp8,
    cast_blocks,
    dequantized_lines,
)
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.precision.delayed_scaling import DelayedScales, Operand
from mcore_parallel.precision.fp8_accumulation import add_scaled_matmul
from mcore_parallel.precision.fp8_cast import DeferredMatrix, cast, cast_lines


@dataclass(frozen=True)
class Cut:
    """The axes over which ranks split a matrix, and so must reduce its largest magnitudes."""

    row: Axis = SINGLE
    """Ranks that hold other parts of the same rows."""
    column: Axis = SINGLE
    """Ranks that hold other parts of the same columns."""
    whole: Axis = SINGLE
    """Ranks that hold other parts of the matrix."""


class Factor(NamedTuple):
    """A matrix in fp8, contiguous along the dimension that a GEMM sums, with its scales."""

    numbers: Shaped[Tensor, "M K"]
    """Empty if only the other memory order was requested."""
    scales: Float[Tensor, "..."]
    """Factors of the numbers: one per matrix, row or block."""


class Scaled(NamedTuple):
    """A matrix in fp8 and its transpose in fp8."""

    rows: Factor
    columns: Factor


class CastOptions(NamedTuple):
    """How an operand is cast."""

    operand: Operand
    dtype: torch.dtype
    """``float8_e4m3fn`` or ``float8_e5m2``."""
    cut: Cut
    """How ranks split the matrix."""
    has_rows: bool
    """Whether the matrix is cast as well, or only its transpose."""


class Recipe(ABC):
    """How operands are cast to fp8 and multiplied."""

    multiple: int = 16
    """Divisor that tensor cores require of all sizes of operands."""
    takes_deferred: bool = False
    """Whether ``cast`` accepts a ``DeferredMatrix``."""

    def claim(self, grad_dtype: torch.dtype) -> "Recipe":  # noqa: ARG002
        """Return the recipe of one linear: this object, unless each linear has a history."""
        return self

    def cast(
        self,
        operand: Operand,
        x: Float[Tensor, "T D"] | DeferredMatrix,
        dtype: torch.dtype,
        cut: Cut,
        *,
        has_rows: bool = True,
    ) -> Scaled:
        """Cast an operand to fp8 in both orders; all-reduces largest magnitudes over ``cut``.

        The arguments are those of ``CastOptions``.
        """
        result = self._cast(x, CastOptions(operand, dtype, cut, has_rows))
        if isinstance(result, Fp8):
            rows, columns, scale_inv = result
            return Scaled(Factor(rows, scale_inv), Factor(columns, scale_inv))
        return Scaled(Factor(*result[:2]), Factor(*result[2:]))

    def multiply(
        self, a: Factor, b: Factor, dtype: torch.dtype, *, fast_accum: bool = False
    ) -> Float[Tensor, "M N"]:
        """Return the matrix product of a and the transpose of b.

        Args:
            a: ``[M, K]``.
            b: ``[N, K]``.
            dtype: dtype of the result.
            fast_accum: if the recipe supports it, let tensor cores accumulate in fewer bits,
                for twice the speed on Hopper.
        """
        if _on_tensor_cores(a):
            return self._matmul(a, b, dtype, fast_accum)
        with without_autocast(a.numbers.device):
            return (self._dequantized(*a) @ self._dequantized(*b).t()).to(dtype)

    def add(self, slot: GradSlot, a: Factor, b: Factor) -> None:
        """Add the product to the slot's main gradient, or overwrite a stale one.

        On a GPU the product is rounded to bfloat16, the widest output of GEMMs with many
        scales.
        """
        assert slot.main is not None
        dtype = torch.bfloat16 if a.numbers.is_cuda else slot.main.dtype
        slot.add(self.multiply(a, b, dtype))

    @abstractmethod
    def _cast(self, x: Any, options: CastOptions) -> Fp8 | FineFp8:
        """Cast as ``cast`` describes."""

    @abstractmethod
    def _matmul(self, a: Factor, b: Factor, dtype: torch.dtype, fast_accum: bool) -> Tensor:
        """Multiply as ``multiply`` describes, on tensor cores."""

    def _dequantized(self, numbers: Tensor, scales: Tensor) -> Tensor:
        return dequantized_lines(numbers, scales)


class Tensorwise(Recipe):
    """One scale per tensor, from the tensor's largest magnitude."""

    takes_deferred = True

    def add(self, slot: GradSlot, a: Factor, b: Factor) -> None:
        """Add the product to the slot's main gradient, in the GEMM's epilogue if supported."""
        assert slot.main is not None
        if _on_tensor_cores(a) and slot.take_stale():
            _one_scale_matmul(a, b, slot.main.dtype, out=slot.main)
        elif add_scaled_matmul.takes(slot.main, a.numbers):
            add_scaled_matmul(slot.main, a.numbers, b.numbers, a.scales, b.scales)
        else:
            slot.add(self.multiply(a, b, slot.main.dtype))

    def _cast(self, x: Any, options: CastOptions) -> Fp8 | FineFp8:
        return cast(x, options.dtype, options.cut.whole, has_rows=options.has_rows)

    def _matmul(self, a: Factor, b: Factor, dtype: torch.dtype, fast_accum: bool) -> Tensor:
        return _one_scale_matmul(a, b, dtype, fast_accum=fast_accum)

    def _dequantized(self, numbers: Tensor, scales: Tensor) -> Tensor:
        return dequantized(numbers, scales)


@dataclass(frozen=True)
class Delayed(Tensorwise):
    """One scale per tensor, from earlier steps; all-reduces only while there is no history."""

    scales: DelayedScales
    """Histories of all linears."""
    name: str
    """Name of the layer, for its linears' names in checkpoints."""
    number: int = -1
    """Number of the linear in ``scales``; -1: not claimed."""

    def claim(self, grad_dtype: torch.dtype) -> Recipe:
        """Register a linear in ``scales`` and return the linear's recipe."""
        return Delayed(self.scales, self.name, self.scales.claim(self.name, grad_dtype))

    def _cast(self, x: Any, options: CastOptions) -> Fp8 | FineFp8:
        operand, dtype, cut, has_rows = options
        return self.scales.cast(self.number, operand, x, dtype, cut.whole, has_rows=has_rows)


class Rowwise(Recipe):
    """One scale per row that a GEMM sums along; the transpose has its own scales.

    All-reduces one magnitude for each row or column that ranks split.
    """

    def _cast(self, x: Any, options: CastOptions) -> Fp8 | FineFp8:
        _, dtype, cut, has_rows = options
        return cast_lines(x, dtype, cut.row, cut.column, has_rows=has_rows)

    def _matmul(self, a: Factor, b: Factor, dtype: torch.dtype, fast_accum: bool) -> Tensor:
        return torch._scaled_mm(
            a.numbers,
            b.numbers.t(),
            a.scales.contiguous(),
            b.scales.t().contiguous(),
            out_dtype=torch.bfloat16,
            use_fast_accum=fast_accum,
        ).to(dtype)


class Blockwise(Recipe):
    """One scale per 128 numbers of a row that a GEMM sums along, 128 x 128 of a weight.

    No communication, since no block is split over ranks. Always accumulates in full precision.
    """

    multiple = BLOCK

    def _cast(self, x: Any, options: CastOptions) -> Fp8 | FineFp8:
        is_square = options.operand == "weight"
        x = x.detach().contiguous()
        return cast_blocks(x, options.dtype, is_square=is_square, has_rows=options.has_rows)

    def _matmul(self, a: Factor, b: Factor, dtype: torch.dtype, _fast_accum: bool) -> Tensor:
        along, square = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        is_square = b.scales.shape[0] != b.numbers.shape[0]
        return F.scaled_mm(
            a.numbers,
            b.numbers.t(),
            a.scales,
            along,
            _padded(b.scales) if is_square else b.scales,
            square if is_square else along,
            output_dtype=torch.bfloat16,
        ).to(dtype)


def _on_tensor_cores(a: Factor) -> bool:
    return a.numbers.is_cuda and a.scales.dtype == torch.float32


def _one_scale_matmul(
    a: Factor,
    b: Factor,
    dtype: torch.dtype,
    *,
    fast_accum: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    return torch._scaled_mm(
        a.numbers,
        b.numbers.t(),
        a.scales,
        b.scales,
        out_dtype=dtype,
        use_fast_accum=fast_accum,
        out=out,
    )


def _padded(scales: Tensor) -> Tensor:
    """Return 128 x 128 scales ``[N/128, K/128]`` in the memory order of the GEMM.

    That is column-major ``[K/128 padded to 4, N/128]``; the casting kernel has padded already.
    """
    count, length = scales.shape
    padded = -(-length // 4) * 4
    if scales.stride() != (padded, 1):
        scales = torch.nn.functional.pad(scales, (0, padded - length))
    return scales.as_strided((padded, count), (1, padded))
