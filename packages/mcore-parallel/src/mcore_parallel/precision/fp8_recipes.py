"""Recipes: how the operands of an fp8 GEMM are scaled, and how they are multiplied then.

``Tensorwise`` and ``Delayed`` have one scale a tensor, of the tensor itself or of earlier
steps. ``Rowwise`` has one for each row that a GEMM sums along, ``Blockwise`` one for 128
numbers of such a row (128 x 128 of a weight), as DeepSeek-V3 does. A finer scale buys range for
tensors with outliers, not digits. ``Mxfp8`` and ``Nvfp4`` are Blackwell's own, see
``block_scaling``.

Reference:
    Micikevicius et al. 2022, FP8 Formats for Deep Learning. arXiv:2209.05433.
    DeepSeek-AI 2024, DeepSeek-V3 Technical Report, 3.3. arXiv:2412.19437.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_parallel.autocasting import without_autocast
from mcore_parallel.grad_slot import GradSlot
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.optional_kernels import works
from mcore_parallel.precision.block_scaling import (
    MX_BLOCK,
    cast_mxfp8,
    cast_nvfp4,
    dequantized_nvfp4,
    multiply_mxfp8,
    multiply_nvfp4,
)
from mcore_parallel.precision.delayed_scaling import DelayedScales, Operand
from mcore_parallel.precision.fp8_accumulation import ADDING_KERNEL, add_scaled_matmul
from mcore_parallel.precision.fp8_cast import Fp8, Uncast, cast, dequantized
from mcore_parallel.precision.fp8_fine_cast import (
    BLOCK,
    FineFp8,
    cast_blocks,
    cast_lines,
    dequantized_lines,
)


@dataclass(frozen=True)
class Cut:
    """How ranks share a matrix, so that they can share its scales."""

    row: Axis = SINGLE
    """Ranks that hold other parts of the same rows."""
    column: Axis = SINGLE
    """Ranks that hold other parts of the same columns."""
    whole: Axis = SINGLE
    """Ranks that hold other parts of the matrix."""


class Factor(NamedTuple):
    """One order of a matrix in fp8, contiguous along the dimension that a GEMM sums."""

    numbers: Shaped[Tensor, "M K"]
    """Empty where this order was not wanted."""
    scales: Float[Tensor, "..."]
    """Multiply the numbers: one, one for each row, or one for each block."""


class Scaled(NamedTuple):
    """A matrix in fp8 and its transpose."""

    rows: Factor
    columns: Factor


class Recipe(ABC):
    """How operands are cast to fp8 and multiplied."""

    multiple: int = 16
    """Sizes of operands are multiples of it: tensor cores take no others."""
    takes_uncast: bool = False
    """Whether ``cast`` takes matrices that are computed when they are cast."""

    def claim(self, grad_dtype: torch.dtype) -> "Recipe":  # noqa: ARG002
        """Return the recipe of one linear: itself, unless it remembers something."""
        return self

    @abstractmethod
    def cast(
        self,
        operand: Operand,
        x: Float[Tensor, "T D"] | Uncast,
        dtype: torch.dtype,
        cut: Cut,
        *,
        has_rows: bool = True,
    ) -> Scaled:
        """Cast an operand; reduces largest magnitudes over axes of ``cut``."""

    @abstractmethod
    def multiply(
        self, a: Factor, b: Factor, dtype: torch.dtype, *, fast_accum: bool = False
    ) -> Float[Tensor, "M N"]:
        """Return the matrix product of a and the transpose of b.

        Args:
            a: ``[M, K]``.
            b: ``[N, K]``.
            dtype: of the result.
            fast_accum: let tensor cores keep sums in fewer bits, for twice the speed on Hopper.
        """

    def add(self, slot: GradSlot, a: Factor, b: Factor) -> None:
        """Add that product to the slot's main gradient, or write it over a stale one.

        Rounded to bfloat16 on a GPU, whose GEMM gives no more for many scales.
        """
        assert slot.main is not None
        dtype = torch.bfloat16 if a.numbers.is_cuda else slot.main.dtype
        slot.add(self.multiply(a, b, dtype))


class Tensorwise(Recipe):
    """One scale a tensor, from its own largest magnitude."""

    takes_uncast = True

    def cast(
        self,
        operand: Operand,  # noqa: ARG002
        x: Float[Tensor, "T D"] | Uncast,
        dtype: torch.dtype,
        cut: Cut,
        *,
        has_rows: bool = True,
    ) -> Scaled:
        """Cast an operand; reduces one number over the ranks that share it."""
        return _with_one_scale(cast(x, dtype, cut.whole, has_rows=has_rows))

    def multiply(
        self,
        a: Factor,
        b: Factor,
        dtype: torch.dtype,
        *,
        fast_accum: bool = False,
        out: Tensor | None = None,
    ) -> Float[Tensor, "M N"]:
        """Return the matrix product of a and the transpose of b, written over ``out``."""
        if _on_tensor_cores(a):
            return torch._scaled_mm(
                a.numbers,
                b.numbers.t(),
                a.scales,
                b.scales,
                out_dtype=dtype,
                use_fast_accum=fast_accum,
                out=out,
            )
        with without_autocast(a.numbers.device):
            product = dequantized(*a) @ dequantized(*b).t()
        return product.to(dtype) if out is None else out.copy_(product)

    def add(self, slot: GradSlot, a: Factor, b: Factor) -> None:
        """Add that product to the slot's main gradient, in the GEMM's epilogue if it can."""
        assert slot.main is not None
        if slot.take_stale():
            self.multiply(a, b, slot.main.dtype, out=slot.main)
        elif _can_add(slot.main, a.numbers):
            add_scaled_matmul(slot.main, a.numbers, b.numbers, a.scales, b.scales)
        else:
            slot.add(self.multiply(a, b, slot.main.dtype))


@dataclass(frozen=True)
class Delayed(Tensorwise):
    """One scale a tensor, from what it was in earlier steps."""

    scales: DelayedScales
    """Of all linears."""
    name: str
    """Of the linears that share this object, in checkpoints."""
    number: int = -1
    """Of one linear; below 0: not claimed yet."""

    def claim(self, grad_dtype: torch.dtype) -> Recipe:
        """Return the recipe of one linear."""
        return Delayed(self.scales, self.name, self.scales.claim(self.name, grad_dtype))

    def cast(
        self,
        operand: Operand,
        x: Float[Tensor, "T D"] | Uncast,
        dtype: torch.dtype,
        cut: Cut,
        *,
        has_rows: bool = True,
    ) -> Scaled:
        """Cast an operand; no communication once there is a history."""
        own = self.scales.cast(self.number, operand, x, dtype, cut.whole, has_rows=has_rows)
        return _with_one_scale(own)


class Rowwise(Recipe):
    """One scale for each row that a GEMM sums along; a matrix and its transpose differ."""

    def cast(
        self,
        operand: Operand,  # noqa: ARG002
        x: Float[Tensor, "T D"],
        dtype: torch.dtype,
        cut: Cut,
        *,
        has_rows: bool = True,
    ) -> Scaled:
        """Cast an operand; reduces a number for each row or column that ranks share."""
        return _with_many_scales(cast_lines(x, dtype, cut.row, cut.column, has_rows=has_rows))

    def multiply(
        self, a: Factor, b: Factor, dtype: torch.dtype, *, fast_accum: bool = False
    ) -> Float[Tensor, "M N"]:
        """Return the matrix product of a and the transpose of b."""
        if not _on_tensor_cores(a):
            return _multiply_lines(a, b, dtype)
        return torch._scaled_mm(
            a.numbers,
            b.numbers.t(),
            a.scales.contiguous(),
            b.scales.t().contiguous(),
            out_dtype=torch.bfloat16,
            use_fast_accum=fast_accum,
        ).to(dtype)


class Blockwise(Recipe):
    """One scale for 128 numbers of a row that a GEMM sums along, 128 x 128 of a weight."""

    multiple = BLOCK

    def cast(
        self,
        operand: Operand,
        x: Float[Tensor, "T D"],
        dtype: torch.dtype,
        cut: Cut,  # noqa: ARG002
        *,
        has_rows: bool = True,
    ) -> Scaled:
        """Cast an operand; no communication: ranks hold whole blocks."""
        is_square = operand == "weight"
        return _with_many_scales(cast_blocks(x, dtype, is_square=is_square, has_rows=has_rows))

    def multiply(
        self,
        a: Factor,
        b: Factor,
        dtype: torch.dtype,
        *,
        fast_accum: bool = False,  # noqa: ARG002
    ) -> Float[Tensor, "M N"]:
        """Return the matrix product of a and the transpose of b; sums are never cut short."""
        if not _on_tensor_cores(a):
            return _multiply_lines(a, b, dtype)
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


class Mxfp8(Recipe):
    """One power of two for 32 numbers of a row that a GEMM sums along."""

    multiple = MX_BLOCK

    def cast(
        self,
        operand: Operand,  # noqa: ARG002
        x: Float[Tensor, "T D"],
        dtype: torch.dtype,  # noqa: ARG002
        cut: Cut,  # noqa: ARG002
        *,
        has_rows: bool = True,
    ) -> Scaled:
        """Cast an operand; no communication: ranks hold whole blocks."""
        return _with_many_scales(cast_mxfp8(x, has_rows=has_rows))

    def multiply(
        self,
        a: Factor,
        b: Factor,
        dtype: torch.dtype,
        *,
        fast_accum: bool = False,  # noqa: ARG002
    ) -> Float[Tensor, "M N"]:
        """Return the matrix product of a and the transpose of b."""
        return (multiply_mxfp8 if _on_tensor_cores(a) else _multiply_lines)(a, b, dtype)


class Nvfp4(Recipe):
    """e2m1 with an e4m3 scale for 16 numbers of a row, 16 x 16 of a weight."""

    multiple = MX_BLOCK

    def cast(
        self,
        operand: Operand,
        x: Float[Tensor, "T D"],
        dtype: torch.dtype,  # noqa: ARG002
        cut: Cut,
        *,
        has_rows: bool = True,
    ) -> Scaled:
        """Cast an operand; reduces two numbers over the ranks that share it."""
        is_weight = operand == "weight"
        return _with_many_scales(
            cast_nvfp4(x, cut.whole, is_weight=is_weight, has_rows=has_rows)
        )

    def multiply(
        self,
        a: Factor,
        b: Factor,
        dtype: torch.dtype,
        *,
        fast_accum: bool = False,  # noqa: ARG002
    ) -> Float[Tensor, "M N"]:
        """Return the matrix product of a and the transpose of b."""
        if _on_tensor_cores(a):
            return multiply_nvfp4(a, b, dtype)
        with without_autocast(a.numbers.device):
            return (dequantized_nvfp4(*a) @ dequantized_nvfp4(*b).t()).to(dtype)


def _multiply_lines(a: Factor, b: Factor, dtype: torch.dtype) -> Tensor:
    with without_autocast(a.numbers.device):
        return (dequantized_lines(*a) @ dequantized_lines(*b).t()).to(dtype)


def _with_one_scale(own: Fp8) -> Scaled:
    return Scaled(Factor(own.rows, own.scale_inv), Factor(own.columns, own.scale_inv))


def _with_many_scales(own: FineFp8) -> Scaled:
    return Scaled(Factor(own.rows, own.row_scales), Factor(own.columns, own.column_scales))


def _on_tensor_cores(a: Factor) -> bool:
    return a.numbers.is_cuda and a.scales.dtype == torch.float32


def _can_add(main: Tensor, a: Tensor) -> bool:
    return (
        main.is_cuda
        and main.data_ptr() % 16 == 0
        and works(ADDING_KERNEL, main.device, main.dtype, a.dtype)
    )


def _padded(scales: Tensor) -> Tensor:
    """Return 128 x 128 scales ``[N/128, K/128]`` as the GEMM reads them.

    By columns of ``[K/128 padded to 4, N/128]``; the kernel that casts pads already.
    """
    count, length = scales.shape
    padded = -(-length // 4) * 4
    if scales.stride() != (padded, 1):
        scales = torch.nn.functional.pad(scales, (0, padded - length))
    return scales.as_strided((padded, count), (1, padded))
