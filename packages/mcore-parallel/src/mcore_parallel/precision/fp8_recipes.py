"""Recipes: how the operands of an fp8 GEMM are scaled, and how they are multiplied then.

``Tensorwise`` and ``Delayed`` have one scale a tensor, of the tensor itself or of earlier
steps. ``Rowwise`` has one for each row that a GEMM sums along, ``Blockwise`` one for 128
numbers of such a row (128 x 128 of a weight), as DeepSeek-V3 does. A finer scale buys range for
tensors with outliers, not digits.

Reference:
    Micikevicius et al. 2022, FP8 Formats for Deep Learning. arXiv:2209.05433.
    DeepSeek-AI 2024, DeepSeek-V3 Technical Report, 3.3. arXiv:2412.19437.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_parallel.autocasting import without_autocast
from mcore_parallel.grad_slot import GradSlot
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.optional_kernels import works
from mcore_parallel.precision.delayed_scaling import DelayedScales, Operand
from mcore_parallel.precision.fp8_accumulation import ADDING_KERNEL, add_scaled_matmul
from mcore_parallel.precision.fp8_cast import Fp8, cast, dequantized
from mcore_parallel.precision.fp8_fine_cast import (
    BLOCK,
    cast_blocks,
    cast_lines,
    dequantized_lines,
)

MULTIPLE = 16
"""Tensor cores take fp8 operands whose sizes are multiples of this."""


@dataclass(frozen=True)
class Cut:
    """How ranks share a matrix, so that they can share its scales."""

    row: Axis = SINGLE
    """Ranks that hold other parts of the same rows."""
    column: Axis = SINGLE
    """Ranks that hold other parts of the same columns."""
    whole: Axis = SINGLE
    """Ranks that hold other parts of the matrix."""


class Scaled(NamedTuple):
    """A matrix in fp8 and its transpose, each with its scales; an order may be empty."""

    rows: Shaped[Tensor, "T D"]
    row_scales: Float[Tensor, "..."]
    columns: Shaped[Tensor, "D T"]
    column_scales: Float[Tensor, "..."]


@runtime_checkable
class Recipe(Protocol):
    """How operands are cast to fp8 and multiplied."""

    @property
    def multiple(self) -> int:
        """Sizes of operands are multiples of it."""
        ...

    def claim(self, grad_dtype: torch.dtype) -> "Recipe":
        """Return the recipe of one linear: itself, if it remembers nothing."""
        ...

    def cast(
        self,
        operand: Operand,
        x: Float[Tensor, "T D"],
        dtype: torch.dtype,
        cut: Cut,
        *,
        has_rows: bool = True,
    ) -> Scaled:
        """Cast an operand; reduces largest magnitudes over axes of ``cut``."""
        ...

    def multiply(
        self,
        a: Shaped[Tensor, "M K"],
        a_scales: Float[Tensor, "..."],
        b: Shaped[Tensor, "N K"],
        b_scales: Float[Tensor, "..."],
        dtype: torch.dtype,
        *,
        fast_accum: bool = False,
    ) -> Float[Tensor, "M N"]:
        """Return the matrix product of a and the transpose of b."""
        ...

    def add(
        self,
        slot: GradSlot,
        a: Shaped[Tensor, "M K"],
        a_scales: Float[Tensor, "..."],
        b: Shaped[Tensor, "N K"],
        b_scales: Float[Tensor, "..."],
    ) -> None:
        """Add that product to the slot's main gradient, or write it over a stale one."""
        ...


class Tensorwise:
    """One scale a tensor, from its own largest magnitude."""

    multiple = MULTIPLE

    def claim(self, grad_dtype: torch.dtype) -> Recipe:  # noqa: ARG002
        """Return itself."""
        return self

    def cast(
        self,
        operand: Operand,  # noqa: ARG002
        x: Float[Tensor, "T D"],
        dtype: torch.dtype,
        cut: Cut,
        *,
        has_rows: bool = True,
    ) -> Scaled:
        """Cast an operand; reduces one number over the ranks that share it."""
        return _with_one_scale(cast(x, dtype, cut.whole, has_rows=has_rows))

    def multiply(
        self,
        a: Shaped[Tensor, "M K"],
        a_scales: Float[Tensor, "..."],
        b: Shaped[Tensor, "N K"],
        b_scales: Float[Tensor, "..."],
        dtype: torch.dtype,
        *,
        fast_accum: bool = False,
    ) -> Float[Tensor, "M N"]:
        """Return the matrix product of a and the transpose of b."""
        return multiply(a, b, a_scales, b_scales, dtype, fast_accum=fast_accum)

    def add(
        self,
        slot: GradSlot,
        a: Shaped[Tensor, "M K"],
        a_scales: Float[Tensor, "..."],
        b: Shaped[Tensor, "N K"],
        b_scales: Float[Tensor, "..."],
    ) -> None:
        """Add that product to the slot's main gradient, in the GEMM's epilogue if it can."""
        assert slot.main is not None
        if slot.take_stale():
            multiply(a, b, a_scales, b_scales, slot.main.dtype, out=slot.main)
        elif _can_add(slot.main, a):
            add_scaled_matmul(slot.main, a, b, a_scales, b_scales)
        else:
            slot.add(multiply(a, b, a_scales, b_scales, slot.main.dtype))


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
        x: Float[Tensor, "T D"],
        dtype: torch.dtype,
        cut: Cut,
        *,
        has_rows: bool = True,
    ) -> Scaled:
        """Cast an operand; no communication once there is a history."""
        own = self.scales.cast(self.number, operand, x, dtype, cut.whole, has_rows=has_rows)
        return _with_one_scale(own)


class Rowwise:
    """One scale for each row that a GEMM sums along; a matrix and its transpose differ."""

    multiple = MULTIPLE

    def claim(self, grad_dtype: torch.dtype) -> Recipe:  # noqa: ARG002
        """Return itself."""
        return self

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
        return Scaled(*cast_lines(x, dtype, cut.row, cut.column, has_rows=has_rows))

    def multiply(
        self,
        a: Shaped[Tensor, "M K"],
        a_scales: Float[Tensor, "..."],
        b: Shaped[Tensor, "N K"],
        b_scales: Float[Tensor, "..."],
        dtype: torch.dtype,
        *,
        fast_accum: bool = False,
    ) -> Float[Tensor, "M N"]:
        """Return the matrix product of a and the transpose of b."""
        if not _on_tensor_cores(a, a_scales):
            return _multiply_fine_plain(a, a_scales, b, b_scales, dtype)
        return torch._scaled_mm(
            a,
            b.t(),
            a_scales.contiguous(),
            b_scales.t().contiguous(),
            out_dtype=torch.bfloat16,
            use_fast_accum=fast_accum,
        ).to(dtype)

    def add(
        self,
        slot: GradSlot,
        a: Shaped[Tensor, "M K"],
        a_scales: Float[Tensor, "..."],
        b: Shaped[Tensor, "N K"],
        b_scales: Float[Tensor, "..."],
    ) -> None:
        """Add that product, rounded to bfloat16 on a GPU, to the slot's main gradient."""
        slot.add(self.multiply(a, a_scales, b, b_scales, _narrow_dtype(slot, a)))


class Blockwise:
    """One scale for 128 numbers of a row that a GEMM sums along, 128 x 128 of a weight."""

    multiple = BLOCK

    def claim(self, grad_dtype: torch.dtype) -> Recipe:  # noqa: ARG002
        """Return itself."""
        return self

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
        return Scaled(*cast_blocks(x, dtype, is_square=is_square, has_rows=has_rows))

    def multiply(
        self,
        a: Shaped[Tensor, "M K"],
        a_scales: Float[Tensor, "..."],
        b: Shaped[Tensor, "N K"],
        b_scales: Float[Tensor, "..."],
        dtype: torch.dtype,
        *,
        fast_accum: bool = False,  # noqa: ARG002
    ) -> Float[Tensor, "M N"]:
        """Return the matrix product of a and the transpose of b; sums are never cut short."""
        if not _on_tensor_cores(a, a_scales):
            return _multiply_fine_plain(a, a_scales, b, b_scales, dtype)
        along, square = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        is_square = b_scales.shape[0] != b.shape[0]
        return F.scaled_mm(
            a,
            b.t(),
            a_scales,
            along,
            _padded(b_scales) if is_square else b_scales,
            square if is_square else along,
            output_dtype=torch.bfloat16,
        ).to(dtype)

    def add(
        self,
        slot: GradSlot,
        a: Shaped[Tensor, "M K"],
        a_scales: Float[Tensor, "..."],
        b: Shaped[Tensor, "N K"],
        b_scales: Float[Tensor, "..."],
    ) -> None:
        """Add that product, rounded to bfloat16 on a GPU, to the slot's main gradient."""
        slot.add(self.multiply(a, a_scales, b, b_scales, _narrow_dtype(slot, a)))


def multiply(
    a: Shaped[Tensor, "M K"],
    b: Shaped[Tensor, "N K"],
    a_scale: Float[Tensor, " 1"],
    b_scale: Float[Tensor, " 1"],
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """Return the scaled matrix product of a and the transpose of b.

    Args:
        a: fp8.
        b: fp8.
        a_scale: multiplies a; float32, or float64 for products in float64.
        b_scale: multiplies b.
        dtype: of the result.
        out: written over with the result, of that dtype.
        fast_accum: let tensor cores keep sums in fewer bits, for twice the speed on Hopper.
    """
    if _on_tensor_cores(a, a_scale):
        return torch._scaled_mm(
            a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast_accum, out=out
        )
    with without_autocast(a.device):
        product = dequantized(a, a_scale) @ dequantized(b, b_scale).t()
    return product.to(dtype) if out is None else out.copy_(product)


def _multiply_fine_plain(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    with without_autocast(a.device):
        wide, other = dequantized_lines(a, a_scales), dequantized_lines(b, b_scales)
        return (wide @ other.t()).to(dtype)


def _with_one_scale(own: Fp8) -> Scaled:
    return Scaled(own.rows, own.scale_inv, own.columns, own.scale_inv)


def _on_tensor_cores(a: Tensor, scales: Tensor) -> bool:
    return a.is_cuda and scales.dtype == torch.float32


def _can_add(main: Tensor, a: Tensor) -> bool:
    return (
        main.is_cuda
        and main.data_ptr() % 16 == 0
        and works(ADDING_KERNEL, main.device, main.dtype, a.dtype)
    )


def _narrow_dtype(slot: GradSlot, a: Tensor) -> torch.dtype:
    assert slot.main is not None
    return torch.bfloat16 if a.is_cuda else slot.main.dtype


def _padded(scales: Tensor) -> Tensor:
    """Return 128 x 128 scales ``[N/128, K/128]`` as the GEMM reads them.

    By columns of ``[K/128 padded to 4, N/128]``; the kernel that casts pads already.
    """
    count, length = scales.shape
    padded = -(-length // 4) * 4
    if scales.stride() != (padded, 1):
        scales = torch.nn.functional.pad(scales, (0, padded - length))
    return scales.as_strided((padded, count), (1, padded))
