"""Triton functions that decode 8-bit and 4-bit codes in registers.

With ``IS_PACKED``, integer instructions turn the four codes of a 32-bit register into two
registers of two bfloat16 numbers: two instructions an element. The hardware's fp8 casts have a
fraction of that throughput. Without ``IS_PACKED``, plain Triton decodes each element, for other
dtypes and for Triton's interpreter. Imported only if tensors are on a GPU.
"""

from typing import no_type_check

import triton
import triton.language as tl

E4M3_FACTOR = tl.constexpr(2.0**120)

# e4m3 -> bfloat16. prmt moves two bytes to the upper halves of 16-bit lanes. Both formats order
# sign, exponent and fraction alike: shifting by 4 aligns the fields, and lop3 adds the sign.
_E4M3 = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
lop3.b32 $0, a, 0x80008000, c, 0xea;
lop3.b32 $1, b, 0x80008000, d, 0xea;
}""")

# int8 -> bfloat16: 128 + the low seven bits (0x4300 is 128), minus 128, or 256 if the sign bit
# is set; one fused multiply-add subtracts.
_INT8 = tl.constexpr("""{
.reg .b32 a, b, c, d, e, f, g;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 c, a, 0x007f007f, 0x43004300, 0xea;
lop3.b32 d, b, 0x007f007f, 0x43004300, 0xea;
lop3.b32 e, a, 0x00800080, 0x43004300, 0xea;
lop3.b32 f, b, 0x00800080, 0x43004300, 0xea;
mov.b32 g, 0xbf80bf80;
fma.rn.bf16x2 $0, e, g, c;
fma.rn.bf16x2 $1, f, g, d;
}""")

# int4 -> bfloat16: 136 + a code from -8 to 7 (0x4308 is 136), minus 136; low nibbles, then
# high.
_INT4 = tl.constexpr("""{
.reg .b32 a, b, c, d, e, f;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 a, a, 0x000f000f, 0x43084308, 0x6a;
lop3.b32 b, b, 0x000f000f, 0x43084308, 0x6a;
lop3.b32 c, c, 0x000f000f, 0x43084308, 0x6a;
lop3.b32 d, d, 0x000f000f, 0x43084308, 0x6a;
mov.b32 e, 0xc308c308;
mov.b32 f, 0x3f803f80;
fma.rn.bf16x2 $0, a, f, e;
fma.rn.bf16x2 $1, b, f, e;
fma.rn.bf16x2 $2, c, f, e;
fma.rn.bf16x2 $3, d, f, e;
}""")


@triton.jit
@no_type_check
def small_e4m3(byte, dtype: tl.constexpr, IS_PACKED: tl.constexpr):
    """Return the numbers of e4m3 codes, divided by ``e4m3_factor``."""
    # The exponent bias is 7 in e4m3 and 127 in bfloat16 and float32: the same bits, read in the
    # wide format, are the number times 2 ** -120.
    if IS_PACKED:
        small = tl.inline_asm_elementwise(
            _E4M3, "=r,=r,r", [byte], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif dtype == tl.bfloat16:
        wide = byte.to(tl.int16)
        small = (((wide & 0x80) << 8) | ((wide & 0x7F) << 4)).to(tl.bfloat16, bitcast=True)
    else:
        bits = byte.to(tl.int32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        small = bits.to(tl.float32, bitcast=True)
        if dtype == tl.float16:
            small = small * E4M3_FACTOR
        small = small.to(dtype)
    return small


@triton.jit
@no_type_check
def small_e4m3_words(word, dtype: tl.constexpr, IS_PACKED: tl.constexpr):
    """Return the numbers of integers of four e4m3 codes, divided by ``e4m3_factor``.

    Reading whole integers saves the instructions that would separate their bytes.
    """
    if IS_PACKED:
        low, high = tl.inline_asm_elementwise(
            _E4M3, "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        pair = tl.join(low, high)  # each integer has two bfloat16 numbers, first one lowest
        pair = tl.reshape(pair, [pair.shape[0], 2 * pair.shape[1]])
        first = (pair & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        second = ((pair >> 16) & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        numbers = tl.join(first, second)
    else:
        even = tl.join(word & 255, (word >> 16) & 255)
        odd = tl.join((word >> 8) & 255, (word >> 24) & 255)
        byte = tl.join(even, odd)  # [..., 2, 2] in the order of memory
        byte = tl.reshape(byte, [byte.shape[0], 2 * byte.shape[1], 2])
        numbers = small_e4m3(byte, dtype, False)
    return tl.reshape(numbers, [numbers.shape[0], 2 * numbers.shape[1]])


@triton.jit
@no_type_check
def e4m3_factor(dtype: tl.constexpr):
    """Return the factor on numbers of ``small_e4m3``: 1 in float16, whose range is small."""
    return 1.0 if dtype == tl.float16 else E4M3_FACTOR


@triton.jit
@no_type_check
def wide_int8(byte, dtype: tl.constexpr, IS_PACKED: tl.constexpr):
    """Return the integers of int8 codes."""
    if IS_PACKED:
        wide = tl.inline_asm_elementwise(
            _INT8, "=r,=r,r", [byte], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        wide = byte.to(tl.int8, bitcast=True).to(dtype)
    return wide


@triton.jit
@no_type_check
def wide_int4(byte, dtype: tl.constexpr, IS_PACKED: tl.constexpr):
    """Return the integers of the low nibbles and of the high nibbles of int4 codes."""
    if IS_PACKED:
        low, high = tl.inline_asm_elementwise(
            _INT4,
            "=r,=r,=r,=r,r",
            [byte],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        # x ^ 8 adds 8 to a four-bit two's complement integer, modulo 16.
        low = ((byte.to(tl.int32) & 15) ^ 8).to(dtype) - 8
        high = ((byte.to(tl.int32) >> 4) ^ 8).to(dtype) - 8
    return low, high


@triton.jit
@no_type_check
def wide_e2m1(code):
    """Return the numbers of e2m1 codes: sign, two bits of exponent, one bit of fraction."""
    # Compute the number times 4 as an integer.
    fraction, exponent = code & 1, (code >> 1) & 3
    size = tl.where(exponent == 0, 2 * fraction, (2 + fraction) << exponent)
    return tl.where((code & 8) > 0, -size, size).to(tl.float32) * 0.25
