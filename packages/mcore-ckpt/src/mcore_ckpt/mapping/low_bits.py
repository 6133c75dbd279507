"""Rounds numbers to codes of eight or four bits, and packs codes into bytes.

``decode`` inverts ``encode`` for numbers that the format can represent; ``unpack`` always
inverts ``pack``. Rounding is to the nearest, ties to the even code. Larger numbers become the
format's largest by a clamp, since torch's casts do not saturate.
"""

from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

Code = Literal["e4m3", "int8", "int4", "e2m1"]
"""A number format; e2m1 is the four-bit float of NVFP4 and MXFP4."""

LARGEST: dict[Code, float] = {"e4m3": 448.0, "int8": 127.0, "int4": 7.0, "e2m1": 6.0}
"""Value to which the largest magnitude of a group is scaled."""

_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*_HALF, *(-value for value in _HALF)])
"""Values of the sixteen codes of e2m1: one bit of sign, two of exponent, one of fraction."""
_BETWEEN = torch.tensor([(a + b) / 2 for a, b in pairwise(_HALF)])


def stored(code: Code) -> tuple[str, tuple[int, int]]:
    """Return safetensors' dtype of packed codes, and rows and columns of codes in one byte."""
    packing = {"e4m3": ("F8_E4M3", (1, 1)), "int8": ("I8", (1, 1)), "int4": ("U8", (2, 1))}
    return packing.get(code, ("U8", (1, 2)))


def encode(x: Float[Tensor, "F D"], code: Code) -> Shaped[Tensor, "F D"]:
    """Round scaled numbers to codes, one for each element.

    Returns:
        float8_e4m3fn; int8 from -127 (``int8``) or -8 to 7 (``int4``); uint8 (``e2m1``).
    """
    if code == "e4m3":
        return x.clamp(-LARGEST[code], LARGEST[code]).to(torch.float8_e4m3fn)
    if code == "e2m1":
        size = x.abs()
        between = _BETWEEN.to(size)
        # Ties go to the even code: 0.75, 1.75 and 3.5 are rounded up, the other ties down.
        low, high = torch.bucketize(size, between), torch.bucketize(size, between, right=True)
        nearest = torch.where(low % 2 == 0, low, high)
        return (nearest + 8 * torch.signbit(x)).to(torch.uint8)
    low = -8.0 if code == "int4" else -LARGEST[code]
    return x.round().clamp(low, LARGEST[code]).to(torch.int8)


def decode(codes: Shaped[Tensor, "*B F D"], code: Code) -> Float[Tensor, "*B F D"]:
    """Return the values of codes before scaling, in float32."""
    if code == "e2m1":
        return E2M1.to(codes.device)[codes.int()]
    return codes.float()


def pack(codes: Shaped[Tensor, "F D"], code: Code) -> Shaped[Tensor, "_ _"]:
    """Pack codes into bytes as files store them.

    ``int4``: two rows share a byte, the even one in its low half, in two's complement.
    ``e2m1``: two columns, the even one in the low half. Eight bits: unchanged.
    """
    if code == "int4":
        low, high = codes[0::2].to(torch.uint8) & 15, codes[1::2].to(torch.uint8) & 15
    elif code == "e2m1":
        low, high = codes[:, 0::2], codes[:, 1::2]
    else:
        return codes
    return low | (high << 4)


def unpack(packed: Shaped[Tensor, "_ _"], code: Code) -> Shaped[Tensor, "F D"]:
    """Inverse of ``pack``."""
    if code not in ("int4", "e2m1"):
        return packed
    low, high = packed & 15, packed >> 4
    if code == "e2m1":
        return torch.stack((low, high), -1).flatten(-2)
    codes = torch.stack((low, high), 1).flatten(0, 1).to(torch.int8)
    return torch.where(codes > 7, codes - 16, codes)  # two's complement of 4 bits
