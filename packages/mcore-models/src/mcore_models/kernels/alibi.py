"""ALiBi: scores fall with the distance of a key, by a slope of each head; no position else.

A softmax forgets what is added to all scores of a query, so the slope times the key's place
does as well as the slope times its distance: and that is a product of a number of the query and
one of the key. So they become channels of their own, and every kernel, also of packed
documents, computes ALiBi without a mask in memory. Places and slopes
that 16 bits do not hold are split into several channels, whose products are exact.

Reference:
    Press et al. 2022, Train Short, Test Long, arXiv:2108.12409, section 3.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

_DIGITS = {torch.bfloat16: (1, 256, 65536), torch.float16: (1, 2048)}
"""Worth of the digits of a place: each is a whole number that the dtype holds."""
_LIFT = {torch.bfloat16: 1, torch.float16: 16}
"""What the key carries of an upper digit's worth: float16 holds no large slope times 2048."""
_NARROW_CHANNELS = 8
"""Channels in 16 bits: kernels take heads of a multiple of 8."""


def alibi_slopes(num_heads: int, device: torch.device | None = None) -> Float[Tensor, " N"]:
    """Return by how much a score of each head falls with each token between, float64.

    A geometric series from 2^(-8/n) to 2^-8 for n heads; where n is no power of two, that of
    the power below, then every other number of the power above.
    """
    series = 2 ** math.floor(math.log2(num_heads))
    number = torch.arange(1, num_heads + 1, dtype=torch.float64, device=device)
    place = torch.where(number <= series, number, number - series - 0.5)
    return torch.exp2(-8 / series * place)


def num_channels(dtype: torch.dtype) -> int:
    """How many channels ``with_distances`` adds."""
    return _NARROW_CHANNELS if dtype in _DIGITS else 1


def with_distances(
    q: Float[Tensor, "S B N H"],
    k: Float[Tensor, "Z B G H"],
    v: Float[Tensor, "Z B G J"],
    slopes: Float[Tensor, " N"],
    scale: float,
    places: Int[Tensor, " Z"] | None = None,
) -> tuple[Float[Tensor, "S B N I"], Float[Tensor, "Z B G I"], Float[Tensor, "Z B G K"]]:
    """Give queries and keys the channels whose product is the slope times the key's place.

    Args:
        q: queries.
        k: keys.
        v: values, which get as many channels of zeros: leave them out of the result.
        slopes: of the heads of ``q``.
        scale: by which scores will be multiplied.
        places: of the keys in their sequence; None: counted from 0.
    """
    places = torch.arange(k.shape[0], device=k.device) if places is None else places
    factors, dtype, more = slopes / scale, q.dtype, num_channels(q.dtype)
    if dtype not in _DIGITS:
        of_heads, of_keys = factors[:, None].to(dtype), places[:, None].to(dtype)
    else:
        # slope * place = sum over digits and slope parts of (part * worth) * digit: a slope is
        # a rounded part and the rest, a place its digits in base 256 or 2048. Each product of
        # two channels is exact in the accumulator, though neither factor holds the whole.
        digits, lift = _DIGITS[dtype], _LIFT[dtype]
        lifts = (1, *(lift for _ in digits[1:]))
        coarse = factors.to(dtype)
        parts = coarse, (factors - coarse).to(dtype)
        # A lifted digit carries a part of its worth, so that no factor leaves float16's range.
        worths = [worth / up for worth, up in zip(digits, lifts, strict=True)]
        of_heads = torch.stack([part * worth for part in parts for worth in worths], -1)
        bounds = (*digits[1:], 2**62)
        rows = zip(digits, bounds, lifts, strict=True)
        found = [places % above // worth * up for worth, above, up in rows]
        of_keys = torch.stack(found * 2, -1).to(dtype)
        missing = more - of_keys.shape[-1]
        of_heads, of_keys = F.pad(of_heads, (0, missing)), F.pad(of_keys, (0, missing))
    of_heads = of_heads.expand(*q.shape[:2], -1, -1)
    of_keys = of_keys[:, None, None].expand(*k.shape[:3], -1)
    return torch.cat([q, of_heads], -1), torch.cat([k, of_keys], -1), F.pad(v, (0, more))
