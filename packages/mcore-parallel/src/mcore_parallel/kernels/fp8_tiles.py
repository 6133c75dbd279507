"""Parts of Triton kernels that cast tiles to fp8 and store them in both orders.

A tile is held as four quarters: rows 0, 4, 8 and so on, rows 1, 5, 9, and two more. One element
of each gives four bytes that follow each other in the transpose, so a tile is turned in words
of four bytes, not byte by byte. Four numbers are cast to a word by instructions that are
written out here: ptxas 12.8 loses casts whose bytes it has to take apart and put together
again. The interpreter knows no instructions, so it casts by Triton's own conversions.
"""

from typing import no_type_check

import torch
from torch import Tensor

from mcore_parallel.optional_kernels import tl, triton

_E4M3 = tl.constexpr("""{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
mov.b32 $0, {low, high};
}""")
_E5M2 = tl.constexpr("""{
.reg .b16 low, high;
cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
mov.b32 $0, {low, high};
}""")


@triton.jit
@no_type_check
def magnitude_bits(value):
    """Return numbers' magnitudes as integers of their width, which are ordered as these are.

    Infinity and NaN are on top; as integers of 16 bits they take half the registers.
    """
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True) & 0x7FFF
    else:
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
@no_type_check
def widened(bits, KIND: tl.constexpr):
    """Return magnitudes in float32 by their bits, which a reduction may have widened."""
    if KIND.primitive_bitwidth == 16:
        bits = bits.to(tl.int16)
    return bits.to(KIND, bitcast=True).to(tl.float32)


@triton.jit
@no_type_check
def raised(largest, bits, KIND: tl.constexpr):
    """Raise ``largest``, a float32's bits, to the largest of some magnitudes; return these'."""
    most = widened(tl.max(bits, 0), KIND)
    # As int32 the bits of non-negative floats are ordered, infinity and NaN on top.
    tl.atomic_max(largest, most.to(tl.int32, bitcast=True), sem="relaxed")
    return most


@triton.jit
@no_type_check
def largest_bits(a, b, c, d):
    """Return the bits of the largest magnitude of each four, one of every quarter."""
    low = tl.maximum(magnitude_bits(a), magnitude_bits(b))
    return tl.maximum(low, tl.maximum(magnitude_bits(c), magnitude_bits(d)))


@triton.jit
@no_type_check
def power_scales(top, SMALLEST: tl.constexpr, IS_E4M3: tl.constexpr):
    """Return the power of two that multiplies what is at most ``top``, and its inverse.

    That is the format's largest number, 1.75 times 2 to the 8th or 15th, by the magnitude,
    rounded down to a power; NaN where the magnitude is not finite.
    """
    EXPONENT: tl.constexpr = 8 if IS_E4M3 else 15
    bits = tl.maximum(top, SMALLEST).to(tl.int32, bitcast=True)
    is_above = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # a mantissa above 1.75
    power = 254 + EXPONENT - (bits >> 23) - is_above
    scale = (power << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
    is_finite = top < float("inf")  # false for NaN
    return tl.where(is_finite, scale, float("nan")), tl.where(is_finite, inverse, float("nan"))


@triton.jit
@no_type_check
def narrow_bytes(value, IS_E4M3: tl.constexpr, COMPILED: tl.constexpr):
    """Cast float32 numbers to bytes; what is above the format's largest number becomes it."""
    if COMPILED:
        code: tl.constexpr = _E4M3 if IS_E4M3 else _E5M2
        narrow = tl.inline_asm_elementwise(
            code, "=r,f,f,f,f", [value], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        limit: tl.constexpr = 448.0 if IS_E4M3 else 57344.0
        kind: tl.constexpr = tl.float8e4nv if IS_E4M3 else tl.float8e5
        value = tl.maximum(value, -limit, propagate_nan=tl.PropagateNan.ALL)
        value = tl.minimum(value, limit, propagate_nan=tl.PropagateNan.ALL)
        narrow = value.to(kind).to(tl.uint8, bitcast=True)
    return narrow


@triton.jit
@no_type_check
def narrow_words(a, b, c, d, IS_E4M3: tl.constexpr, COMPILED: tl.constexpr):
    """Cast four tiles of float32 to one of words, the first in the lowest byte."""
    if COMPILED:
        code: tl.constexpr = _E4M3 if IS_E4M3 else _E5M2
        word = tl.inline_asm_elementwise(
            code, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = narrow_bytes(a, IS_E4M3, False).to(tl.int32)
        low |= narrow_bytes(b, IS_E4M3, False).to(tl.int32) << 8
        high = narrow_bytes(c, IS_E4M3, False).to(tl.int32) << 16
        word = low | high | (narrow_bytes(d, IS_E4M3, False).to(tl.int32) << 24)
    return word


@triton.jit
@no_type_check
def load_quarters(x, word, column, stride, inside=None):
    """Load the four quarters of a tile.

    Args:
        x: pointer to the matrix.
        word: numbers of the tile's words in a column of the transpose.
        column: numbers of the tile's columns.
        stride: from one row to the next.
        inside: which places of a quarter lie within the matrix, zeros elsewhere; None: all.
    """
    other: tl.constexpr = None if inside is None else 0.0
    place = (word * 4)[:, None] * stride + column[None, :]
    a = tl.load(x + place, mask=inside, other=other)
    b = tl.load(x + place + stride, mask=inside, other=other)
    place += 2 * stride
    c = tl.load(x + place, mask=inside, other=other)
    return a, b, c, tl.load(x + place + stride, mask=inside, other=other)


@triton.jit
@no_type_check
def store_quarters(
    rows, a, b, c, d, word, column, stride, IS_E4M3: tl.constexpr, COMPILED: tl.constexpr,
    inside=None,
):  # fmt: skip
    """Cast the four quarters of a tile and store them in the matrix' own order."""
    at = rows + (word * 4)[:, None] * stride + column[None, :]
    tl.store(at, narrow_bytes(a, IS_E4M3, COMPILED), mask=inside)
    tl.store(at + stride, narrow_bytes(b, IS_E4M3, COMPILED), mask=inside)
    at += 2 * stride
    tl.store(at, narrow_bytes(c, IS_E4M3, COMPILED), mask=inside)
    tl.store(at + stride, narrow_bytes(d, IS_E4M3, COMPILED), mask=inside)


@triton.jit
@no_type_check
def store_turned(
    columns, a, b, c, d, word, column, num_rows, IS_E4M3: tl.constexpr, COMPILED: tl.constexpr,
    inside=None,
):  # fmt: skip
    """Cast the four quarters of a tile and store its transpose, whose rows are in words."""
    words = narrow_words(a, b, c, d, IS_E4M3, COMPILED)
    place = column[:, None] * (num_rows // 4) + word[None, :]
    turned = None if inside is None else tl.trans(inside)
    tl.store(columns + place, tl.trans(words), mask=turned)


@triton.jit
@no_type_check
def both_scales(amax, LIMIT: tl.constexpr, SMALLEST: tl.constexpr):
    """Return what multiplies numbers of this magnitude, and what undoes that; else NaN."""
    top = tl.load(amax)
    is_finite = top < float("inf")  # false for NaN
    top = tl.maximum(top, SMALLEST)
    limit = tl.full([], LIMIT, tl.float32)
    scale, inverse = tl.div_rn(limit, top), tl.div_rn(top, limit)
    return tl.where(is_finite, scale, float("nan")), tl.where(is_finite, inverse, float("nan"))


@triton.jit
@no_type_check
def one_scale(amax, scale_inv, LIMIT: tl.constexpr, SMALLEST: tl.constexpr):
    """Return what multiplies a matrix of this magnitude; one program stores its inverse."""
    scale, inverse = both_scales(amax, LIMIT, SMALLEST)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, inverse)
    return scale


@triton.jit
@no_type_check
def store_both(
    rows, columns, a, b, c, d, scale, seen, word, column, stride, num_rows,
    IS_E4M3: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_SEEN: tl.constexpr,
    COMPILED: tl.constexpr, inside,
):  # fmt: skip
    """Scale and cast the quarters of a tile; store them in both orders.

    With ``HAS_SEEN`` raises the bits ``seen`` to the largest magnitude of the quarters; the
    tile is NaN if that is not finite. The transpose is written in words.
    """
    if HAS_SEEN:
        bits = largest_bits(a, b, c, d)
        size: tl.constexpr = bits.shape[0] * bits.shape[1]
        most = raised(seen, tl.reshape(bits, [size], can_reorder=True), a.dtype)
        # The scale is of other numbers than these, so it says nothing of them.
        scale = tl.where(most < float("inf"), scale, float("nan"))
    a, b = a.to(tl.float32) * scale, b.to(tl.float32) * scale
    c, d = c.to(tl.float32) * scale, d.to(tl.float32) * scale
    if HAS_ROWS:
        store_quarters(rows, a, b, c, d, word, column, stride, IS_E4M3, COMPILED, inside)
    store_turned(columns, a, b, c, d, word, column, num_rows, IS_E4M3, COMPILED, inside)


def empty_outputs(
    num_rows: int, width: int, device: torch.device, *, has_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for what ``store_both`` and ``one_scale`` write.

    Returns:
        Bytes of the matrix in its own order, empty without ``has_rows``; its transpose in words
        of four bytes, ``[width, num_rows / 4]``; the inverse of its scale, float32.
    """
    shape = (num_rows, width) if has_rows else (0, 0)
    rows = torch.empty(shape, dtype=torch.uint8, device=device)
    columns = torch.empty(width, num_rows // 4, dtype=torch.int32, device=device)
    return rows, columns, torch.empty(1, dtype=torch.float32, device=device)
