"""Casting matrices for Blackwell's tensor cores, whose scales are narrow too: MXFP8 and NVFP4.

MXFP8 is e4m3 with a power of two (e8m0) for 32 numbers of a row that a GEMM sums along. NVFP4
is e2m1, two numbers a byte, with an e4m3 scale for 16 numbers, 16 x 16 of a weight, under one
scale of the tensor. That one is a power of two here, so that the product of both is a float32
number without rounding, from which the GEMM's own two are found again.

NVFP4 mixes tokens of inputs and gradients for the weight's gradient, 16 at a time, by an
orthogonal matrix: the same product, with outliers spread. It differs from the paper's recipe in
one thing: gradients are rounded to nearest, not at random.

Reference:
    Rouhani et al. 2023, Microscaling Data Formats for Deep Learning. arXiv:2310.10537.
    NVIDIA 2025, Pretraining Large Language Models with NVFP4. arXiv:2509.25149.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.optional_kernels import OptionalKernel, wave
from mcore_parallel.precision.fp8_fine_cast import FineFp8, dequantized_lines, scaled_by_tops

MX_BLOCK, NV_BLOCK = 32, 16
"""Numbers that share a scale."""
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1, by code; 8 more for those below 0."""
_TOP, _TOP_SCALE = LEVELS[-1], torch.finfo(torch.float8_e4m3fn).max
_SIGNS = 0b0110_1001_1100_0101  # of the mixing matrix' rows, any that are not alike


def cast_mxfp8(x: Float[Tensor, "T D"], *, has_rows: bool = True) -> FineFp8:
    """Cast a matrix and its transpose to MXFP8; no communication.

    Args:
        x: floating, any memory order; sizes are multiples of ``MX_BLOCK``.
        has_rows: whether to give the matrix in its own order.
    """
    x = x.detach()
    rows = _cast_mx(x) if has_rows else (x.new_empty(0, 0), x.new_empty(0, 0))
    return FineFp8(*rows, *_cast_mx(x.t()))


def _cast_mx(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.unflatten(-1, (-1, MX_BLOCK))
    tops = blocks.abs().amax(-1, keepdim=True)
    numbers, scales = scaled_by_tops(blocks, tops, torch.float8_e4m3fn, is_power=True)
    return numbers.flatten(-2), scales[..., 0]


def cast_nvfp4(
    x: Float[Tensor, "T D"],
    axis: Axis = SINGLE,
    *,
    is_weight: bool = False,
    has_rows: bool = True,
) -> FineFp8:
    """Cast a matrix and its transpose to NVFP4; all-reduces two numbers over ``axis``.

    Args:
        x: floating, any memory order; sizes are multiples of 32.
        axis: ranks that hold other parts of the matrix.
        is_weight: share scales in squares, and mix no tokens for the transpose.
        has_rows: whether to give the matrix in its own order.
    """
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    across = x.t().contiguous() if is_weight else mixed(x.t())
    tops = torch.stack([x.abs().amax(), across.abs().amax()])
    row_top, column_top = all_reduce(tops, axis, "max").unbind()
    rows = _cast_nv(x, row_top, is_weight) if has_rows else (x.new_empty(0, 0),) * 2
    return FineFp8(*rows, *_cast_nv(across, column_top, is_weight))


def mixed(x: Float[Tensor, "D T"]) -> Float[Tensor, "D T"]:
    """Multiply each 16 neighbours of a row by an orthogonal matrix: Hadamard's, with signs."""
    place = torch.arange(NV_BLOCK, device=x.device)
    bits = place[:, None] & place
    parity = sum((bits >> i) & 1 for i in range(4)) + ((_SIGNS >> place) & 1)[:, None]
    matrix = (1 - 2 * (parity % 2)).to(x.dtype) / 4
    return (x.unflatten(-1, (-1, NV_BLOCK)) @ matrix).flatten(-2)


def _cast_nv(x: Tensor, top: Tensor, is_square: bool) -> tuple[Tensor, Tensor]:
    height = NV_BLOCK if is_square else 1
    blocks = x.unflatten(0, (-1, height)).unflatten(-1, (-1, NV_BLOCK))
    whole = _power_from(top / (_TOP * _TOP_SCALE))
    scales = blocks.abs().amax((1, 3), keepdim=True) / (_TOP * whole)
    scales = scales.to(torch.float8_e4m3fn).to(x.dtype) * whole
    levels = (blocks / torch.where(scales == 0, 1.0, scales)).clamp(-_TOP, _TOP)
    size = levels.abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    sizes = torch.tensor(LEVELS, dtype=x.dtype, device=x.device)
    codes = torch.bucketize((size / step).round() * step, sizes).to(torch.uint8)
    codes = (codes + 8 * (levels < 0)).to(torch.uint8).view(x.shape)
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    return packed, scales.expand(-1, height, -1, 1).flatten(0, 1)[..., 0].contiguous()


def dequantized_nvfp4(
    packed: UInt8[Tensor, "M _"], scales: Float[Tensor, "M _"]
) -> Float[Tensor, "M K"]:
    """Return what a cast matrix stands for, in the dtype of its scales."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    sizes = torch.tensor(LEVELS, dtype=scales.dtype, device=scales.device)
    values = torch.cat([sizes, -sizes])[codes.long()]
    return (values.unflatten(-1, (-1, NV_BLOCK)) * scales[..., None]).flatten(-2)


def multiply_mxfp8(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Float[Tensor, "M N"]:
    """Return the matrix product of a and the transpose of b, by Blackwell's tensor cores."""
    along, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    (rows, row_scales), (columns, column_scales) = a, b
    scales = [swizzled(s.to(torch.float8_e8m0fnu)) for s in (row_scales, column_scales)]
    return F.scaled_mm(
        rows, columns.t(), scales[0], along, scales[1], along, swizzle, swizzle
    ).to(dtype)


def multiply_nvfp4(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Float[Tensor, "M N"]:
    """Return the matrix product of a and the transpose of b, by Blackwell's tensor cores."""
    levels = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzles = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    (rows, row_scales), (columns, column_scales) = a, b
    return F.scaled_mm(
        rows.view(torch.float4_e2m1fn_x2),
        columns.view(torch.float4_e2m1fn_x2).t(),
        split_scales(row_scales),
        levels,
        split_scales(column_scales),
        levels,
        swizzles,
        swizzles,
    ).to(dtype)


def split_scales(scales: Float[Tensor, "M _"]) -> list[Tensor]:
    """Split NVFP4's scales into e4m3 ones, swizzled, and one of the tensor, without rounding.

    That one may be smaller than the cast's own, never larger: e4m3 numbers times a power of two
    are e4m3 numbers as long as they stay within its largest.
    """
    whole = _power_from(scales.amax() / _TOP_SCALE)
    return [swizzled((scales / whole).to(torch.float8_e4m3fn)), whole.view(1)]


def _power_from(x: Tensor) -> Tensor:
    """Return the least power of two not below a number above 0; NaN where x is not finite."""
    mantissa, exponent = torch.frexp(x)  # the mantissa of a power is a half
    power = torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())
    return torch.where(x.isfinite(), power, float("nan"))


def swizzled(scales: Shaped[Tensor, "M C"]) -> Shaped[Tensor, " _"]:
    """Return scales in the order of cublas: tiles of 128 x 4, in each of them rows 32 apart.

    NVIDIA, cuBLAS 13 documentation, "1D Block Scaling Factors Layout".
    """
    rows, columns = scales.shape
    bytes_ = F.pad(scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = bytes_.view(-1, 4, 32, bytes_.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.flatten().view(scales.dtype)


def _try_gemm(device: torch.device, recipe: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Multiply by tensor cores and by the emulation; a trial, whose scales all differ."""
    has_eight = recipe == "mxfp8"
    cast, multiply, dequantized = (
        (cast_mxfp8, multiply_mxfp8, dequantized_lines)
        if has_eight
        else (cast_nvfp4, multiply_nvfp4, dequantized_nvfp4)
    )
    factors = []
    for size in (160, 224):  # neither fills whole tiles of scales
        sizes = wave(size, 10, device=device, dtype=torch.float32).mul(4).exp2()
        x = wave(size, 160, device=device, dtype=torch.float32)
        own = cast(x * sizes.repeat_interleave(NV_BLOCK, 1))
        factors.append((own.rows, own.row_scales))
    a, b = factors
    yield multiply(a, b, torch.float32), dequantized(*a) @ dequantized(*b).t()


BLACKWELL_GEMM = OptionalKernel("torch's GEMM of narrow scales", ("nvidia-cublas",), _try_gemm)
"""What multiplies on a GPU, by recipe: ``mxfp8`` or ``nvfp4``. Nothing replaces it there."""
