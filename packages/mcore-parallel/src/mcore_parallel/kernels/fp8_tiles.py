"""Parts of Triton kernels that cast tiles to fp8 and store them in both orders.

A tile is held as four quarters: rows 0, 4, 8 and so on, rows 1, 5, 9, and two more. One element
of each gives four bytes that follow each other in the transpose, so a tile is turned in words
of four bytes, not byte by byte. Four numbers are cast to a word by instructions that are
written out here: ptxas 12.8 loses casts whose bytes it has to take apart and put together
again. The interpreter knows no instructions, so it casts by Triton's own conversions.
"""

from typing import no_type_check

import triton
import triton.language as tl

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
    """Return 16-bit numbers' magnitudes as integers, which are ordered as these are.

    Infinity and NaN are on top; as integers of 16 bits they take half the registers.
    """
    return value.to(tl.int16, bitcast=True) & 0x7FFF


@triton.jit
@no_type_check
def widened(bits, KIND: tl.constexpr):
    """Return magnitudes in float32 by their bits, which a reduction may have widened."""
    return bits.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)


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
def load_quarters(x, word, column, stride):
    """Load the four quarters of a tile that lies within its matrix.

    Args:
        x: pointer to the matrix.
        word: numbers of the tile's words in a column of the transpose.
        column: numbers of the tile's columns.
        stride: from one row to the next.
    """
    place = (word * 4)[:, None] * stride + column[None, :]
    a, b = tl.load(x + place), tl.load(x + place + stride)
    place += 2 * stride
    return a, b, tl.load(x + place), tl.load(x + place + stride)


@triton.jit
@no_type_check
def store_quarters(
    rows, a, b, c, d, word, column, stride, IS_E4M3: tl.constexpr, COMPILED: tl.constexpr
):
    """Cast the four quarters of a tile and store them in the matrix' own order."""
    at = rows + (word * 4)[:, None] * stride + column[None, :]
    tl.store(at, narrow_bytes(a, IS_E4M3, COMPILED))
    tl.store(at + stride, narrow_bytes(b, IS_E4M3, COMPILED))
    at += 2 * stride
    tl.store(at, narrow_bytes(c, IS_E4M3, COMPILED))
    tl.store(at + stride, narrow_bytes(d, IS_E4M3, COMPILED))


@triton.jit
@no_type_check
def store_turned(
    columns, a, b, c, d, word, column, num_rows, IS_E4M3: tl.constexpr, COMPILED: tl.constexpr
):
    """Cast the four quarters of a tile and store its transpose, whose rows are in words."""
    words = narrow_words(a, b, c, d, IS_E4M3, COMPILED)
    place = column[:, None] * (num_rows // 4) + word[None, :]
    tl.store(columns + place, tl.trans(words))
