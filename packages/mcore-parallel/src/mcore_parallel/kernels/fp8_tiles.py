"""Triton functions that cast tiles to fp8 and store them in both memory orders.

A tile is loaded as four quarters: rows 0, 4, 8, ..., rows 1, 5, 9, ..., and so on. One element
of each quarter gives four bytes that are adjacent in the transpose, so a tile is transposed in
words of four bytes instead of single bytes. Inline PTX casts four numbers to a word: ptxas 12.8
drops casts whose bytes it would have to split and join. In the interpreter, which cannot run
PTX, Triton's own conversions cast.
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
    """Return magnitudes as integers of the same width and order.

    The bits of non-negative floats are ordered like the floats, with infinity and NaN on top.
    Integers of 16 bits need half the registers of float32.
    """
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True) & 0x7FFF
    else:
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
@no_type_check
def widened(bits, KIND: tl.constexpr):
    """Convert ``magnitude_bits``, which a reduction may have widened, to float32."""
    if KIND.primitive_bitwidth == 16:
        bits = bits.to(tl.int16)
    return bits.to(KIND, bitcast=True).to(tl.float32)


@triton.jit
@no_type_check
def raised(largest, bits, KIND: tl.constexpr):
    """Raise the float32 bits at ``largest`` to the largest of some magnitudes; return that."""
    most = widened(tl.max(bits), KIND)
    # As int32 the bits of non-negative floats are ordered, infinity and NaN on top.
    tl.atomic_max(largest, most.to(tl.int32, bitcast=True), sem="relaxed")
    return most


@triton.jit
@no_type_check
def largest_bits(a, b, c, d):
    """Return the elementwise largest magnitude of the four quarters, as bits."""
    low = tl.maximum(magnitude_bits(a), magnitude_bits(b))
    return tl.maximum(low, tl.maximum(magnitude_bits(c), magnitude_bits(d)))


@triton.jit
@no_type_check
def power_scales(top, SMALLEST: tl.constexpr, IS_E4M3: tl.constexpr):
    """Return the power-of-two scale of numbers up to ``top``, and its inverse.

    The scale is (largest number of the format) / top, rounded down to a power of two. The
    largest number is 1.75 * 2^8 in e4m3 and 1.75 * 2^15 in e5m2. NaN if ``top`` is not finite.
    """
    EXPONENT: tl.constexpr = 8 if IS_E4M3 else 15
    bits = tl.maximum(top, SMALLEST).to(tl.int32, bitcast=True)
    # With top = m * 2^(e - 127), scale = 2^(EXPONENT - (e - 127)), halved if m > 1.75; in
    # biased form the exponent of the scale is 127 + EXPONENT - (e - 127) = 254 + EXPONENT - e.
    is_above = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = 254 + EXPONENT - (bits >> 23) - is_above
    scale = (power << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
    is_finite = top < float("inf")  # false for NaN
    return tl.where(is_finite, scale, float("nan")), tl.where(is_finite, inverse, float("nan"))


@triton.jit
@no_type_check
def narrow_bytes(value, IS_E4M3: tl.constexpr, COMPILED: tl.constexpr):
    """Cast float32 numbers to fp8 bytes, saturating at the format's largest number."""
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
    """Cast four float32 tiles to one tile of words, the first tile in the lowest byte."""
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
        word: indices of the tile's words in a row of the transpose; word w is rows 4w to 4w +
            3.
        column: indices of the tile's columns.
        stride: elements from one row to the next.
        inside: mask of a quarter's elements inside the matrix, zeros elsewhere; None: all.
    """
    other: tl.constexpr = None if inside is None else 0.0
    index = (word * 4)[:, None] * stride + column[None, :]
    a = tl.load(x + index, mask=inside, other=other)
    b = tl.load(x + index + stride, mask=inside, other=other)
    index += 2 * stride
    c = tl.load(x + index, mask=inside, other=other)
    return a, b, c, tl.load(x + index + stride, mask=inside, other=other)


@triton.jit
@no_type_check
def store_quarters(
    rows, a, b, c, d, word, column, stride, IS_E4M3: tl.constexpr, COMPILED: tl.constexpr,
    inside=None,
):  # fmt: skip
    """Cast the four quarters of a tile and store them in the matrix' own order."""
    target = rows + (word * 4)[:, None] * stride + column[None, :]
    tl.store(target, narrow_bytes(a, IS_E4M3, COMPILED), mask=inside)
    tl.store(target + stride, narrow_bytes(b, IS_E4M3, COMPILED), mask=inside)
    target += 2 * stride
    tl.store(target, narrow_bytes(c, IS_E4M3, COMPILED), mask=inside)
    tl.store(target + stride, narrow_bytes(d, IS_E4M3, COMPILED), mask=inside)


@triton.jit
@no_type_check
def store_turned(
    columns, a, b, c, d, word, column, num_rows, IS_E4M3: tl.constexpr, COMPILED: tl.constexpr,
    inside=None,
):  # fmt: skip
    """Cast the four quarters of a tile and store the tile's transpose in words."""
    words = narrow_words(a, b, c, d, IS_E4M3, COMPILED)
    index = column[:, None] * (num_rows // 4) + word[None, :]
    mask = None if inside is None else tl.trans(inside)
    tl.store(columns + index, tl.trans(words), mask=mask)


@triton.jit
@no_type_check
def both_scales(amax, LIMIT: tl.constexpr, SMALLEST: tl.constexpr):
    """Return the scale LIMIT / amax and its inverse; NaN if ``amax`` is not finite."""
    top = tl.load(amax)
    is_finite = top < float("inf")  # false for NaN
    top = tl.maximum(top, SMALLEST)
    limit = tl.full([], LIMIT, tl.float32)
    scale, inverse = tl.div_rn(limit, top), tl.div_rn(top, limit)
    return tl.where(is_finite, scale, float("nan")), tl.where(is_finite, inverse, float("nan"))


@triton.jit
@no_type_check
def one_scale(amax, scale_inv, LIMIT: tl.constexpr, SMALLEST: tl.constexpr):
    """Return the scale of a matrix; the first program stores the scale's inverse."""
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
        most = raised(seen, largest_bits(a, b, c, d), a.dtype)
        # The scale comes from earlier steps, so it is finite even if these numbers are not.
        scale = tl.where(most < float("inf"), scale, float("nan"))
    a, b = a.to(tl.float32) * scale, b.to(tl.float32) * scale
    c, d = c.to(tl.float32) * scale, d.to(tl.float32) * scale
    if HAS_ROWS:
        store_quarters(rows, a, b, c, d, word, column, stride, IS_E4M3, COMPILED, inside)
    store_turned(columns, a, b, c, d, word, column, num_rows, IS_E4M3, COMPILED, inside)


def empty_outputs(
    num_rows: int, width: int, device: torch.device, *, has_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the outputs of ``store_both`` and ``one_scale``.

    Returns:
        Bytes of the matrix in its own order, empty without ``has_rows``; its transpose in words
        of four bytes, ``[width, num_rows / 4]``; the inverse of its scale, float32.
    """
    shape = (num_rows, width) if has_rows else (0, 0)
    rows = torch.empty(shape, dtype=torch.uint8, device=device)
    columns = torch.empty(width, num_rows // 4, dtype=torch.int32, device=device)
    return rows, columns, torch.empty(1, dtype=torch.float32, device=device)
