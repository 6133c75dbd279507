"""Rows in fp8: exchange of tokens in half the bytes, and the experts' GEMMs.

Every row is cast to e4m3 with its own scale, and every row of a weight, along which a GEMM
sums. So no scale depends on which rows a rank or an expert gets, and the rows of an expert
need no alignment. Forward and the input's gradient are fp8 GEMMs; the weight's gradient is
computed and added in the model's dtype, as in ``grouped_gemm``.

On Hopper the GEMM is torch's scaled grouped GEMM; elsewhere, and for float64, the same fp8
numbers are multiplied in the dtype of the scales.

Reference:
    DeepSeek-AI 2024, DeepSeek-V3, 3.3: dispatch and experts in fp8. arXiv:2412.19437.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mcore_moe.config import MoEConfig
from mcore_moe.experts.grouped_gemm import sequential_linear
from mcore_moe.experts.weight_gradient import Factors, take_weight_gradient
from mcore_moe.kernels.fp8_rows import FP8, Fp8Rows, cast_rows
from mcore_parallel.autograd.functions import OnceDifferentiable, cast_factor
from mcore_parallel.autograd.grad_slot import slot_of
from mcore_parallel.precision.fp8 import WeightCasts
from mcore_parallel.precision.fp8_cast import cast_lines


def exchange_narrow(
    x: Float[Tensor, "R D"],
    exchange: Callable[[Tensor], Tensor],
    back: Callable[[Tensor], Tensor],
) -> Float[Tensor, "Q D"]:
    """Exchange rows in fp8, each with its scale; gradients keep the dtype of the rows.

    Args:
        x: rows.
        exchange: sends and receives rows of bytes.
        back: the backward of ``exchange``, for gradients in the dtype of the rows.
    """
    return _ExchangeNarrow.apply(x, exchange, back)


def packed(x: Float[Tensor, "R D"]) -> Shaped[Tensor, "R B"]:
    """Return each row's fp8 numbers and its scale as bytes, so that one exchange sends both."""
    numbers, scales = cast_rows(x)
    scales = scales.reshape(-1).view(torch.uint8).view(x.shape[0], scales.itemsize)
    return torch.cat([numbers.view(torch.uint8), scales], 1)


def unpacked(data: Shaped[Tensor, "R B"], dtype: torch.dtype) -> Float[Tensor, "R D"]:
    """Return the dequantized rows of the bytes that ``packed`` returns.

    Args:
        data: numbers and scale of each row.
        dtype: of the rows before ``packed``.
    """
    wide = torch.promote_types(dtype, torch.float32)
    numbers, scales = data.split([data.shape[1] - wide.itemsize, wide.itemsize], 1)
    # A view as float32 needs contiguous, aligned bytes: copy the slice of columns.
    scales = scales.clone(memory_format=torch.contiguous_format).reshape(-1).view(wide)[:, None]
    return Fp8Rows(numbers.view(FP8), scales).wide().to(dtype)


def wire_casts(config: MoEConfig, x: Float[Tensor, "R D"]) -> dict[str, Any]:
    """Return the encode and decode arguments of a ``begin_`` collective; empty without fp8."""
    if not config.moe_dispatch_dtype:
        return {}
    return {"encode": packed, "decode": partial(unpacked, dtype=x.dtype)}


class _ExchangeNarrow(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Any, back: Any) -> Tensor:
        ctx.back = back
        return unpacked(exchange(packed(x)), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad), None, None


def fp8_linear(
    x: Float[Tensor, "R K"],
    weight: Float[Tensor, "e N K"],
    offsets: Int[Tensor, " e1"],
    *,
    casts: WeightCasts,
) -> Float[Tensor, "R N"]:
    """Multiply each expert's rows with its weight; forward and the input's gradient in fp8.

    The relative error of the result, and of the input's gradient, is 4 % (norm of the error
    over norm of the result). The weight's gradient is added to its main gradient if there is
    one.

    Args:
        x: rows sorted by expert.
        weight: of all experts of this rank.
        offsets: first row of each expert, and the end of the last expert's rows; int32.
        casts: cache of the weights' casts during a step.
    """
    return _Fp8Linear.apply(x, weight, offsets, casts)


class _Fp8Linear(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, casts: WeightCasts
    ) -> Tensor:
        # Saved tensors may be copies, without a slot: take the slot from the original.
        ctx.slot, ctx.casts = slot_of(weight), casts
        x, weight = cast_factor(x), cast_factor(weight)
        ctx.save_for_backward(x, weight, offsets)
        rows, _ = weight_casts(weight, casts)
        return multiply_rows(cast_rows(x), rows, offsets, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        grad_x = grad_weight = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            _, columns = weight_casts(weight, ctx.casts)
            grad_x = multiply_rows(cast_rows(grad), columns, offsets, x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = take_weight_gradient(ctx.slot, weight, Factors(grad, x, offsets))
        return grad_x, grad_weight, None, None


def weight_casts(weight: Float[Tensor, "e N K"], casts: WeightCasts) -> tuple[Fp8Rows, Fp8Rows]:
    """Return stacked weights in fp8 and their transposes, cast once a step."""

    def make() -> tuple[Fp8Rows, Fp8Rows]:
        cast = cast_lines(weight, FP8)
        return Fp8Rows(cast.rows, cast.row_scales), Fp8Rows(cast.columns, cast.column_scales)

    return casts.kept(weight, make)


def multiply_rows(
    a: Fp8Rows, b: Fp8Rows, offsets: Int[Tensor, " e1"], dtype: torch.dtype
) -> Float[Tensor, "R N"]:
    """Return the products of each expert's rows in a with the rows of its matrix in b.

    Args:
        a: rows sorted by expert.
        b: matrices ``[e, N, K]``.
        offsets: first row of each expert, and the end of the last expert's rows; int32.
        dtype: of the result.
    """
    if not _has_grouped_kernel(a, b):
        return sequential_linear(a.wide(), b.wide(), offsets).to(dtype)
    if not a.numbers.shape[0]:
        return a.numbers.new_empty(0, b.numbers.shape[1], dtype=dtype)
    return torch._scaled_grouped_mm(
        a.numbers,
        b.numbers.mT,
        a.scales[..., 0],
        b.scales[..., 0],
        offs=offsets[1:],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    ).to(dtype)


def _has_grouped_kernel(a: Fp8Rows, b: Fp8Rows) -> bool:
    """Return whether torch has a grouped GEMM of scaled rows: in torch 2.11 on Hopper only."""
    device = a.numbers.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    is_aligned = all(size % 16 == 0 for size in b.numbers.shape[1:])
    return is_aligned and a.scales.dtype == torch.float32
