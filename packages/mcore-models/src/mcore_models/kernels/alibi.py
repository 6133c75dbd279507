"""ALiBi: each head's scores fall linearly with the distance to the key.

Softmax is invariant to a constant added to all scores of a query. So slope times the key's
position has the same effect as minus slope times the distance, and is a product of a number of
the query's head and a number of the key. These numbers become additional channels of queries
and keys, so that every kernel, also for packed documents, computes ALiBi without a mask in
memory. Positions and slopes that 16 bits cannot represent are split into several channels,
whose products are exact.

Reference:
    Press et al. 2022, Train Short, Test Long, arXiv:2108.12409, section 3.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

_DIGITS = {torch.bfloat16: (1, 256, 65536), torch.float16: (1, 2048)}
"""Place values of a position's digits; the dtype represents every digit exactly."""
_LIFT = {torch.bfloat16: 1, torch.float16: 16}
"""Factor of an upper digit's place value that is in the key instead of the query: float16
overflows for a large slope times 2048."""
_NARROW_CHANNELS = 8
"""Channels in 16 bits: kernels require heads of a multiple of 8."""


def alibi_slopes(num_heads: int, device: torch.device | None = None) -> Float[Tensor, " N"]:
    """Return the slope of each head, float64: the drop of a score for each token of distance.

    A geometric series from 2^(-8/n) to 2^-8 for n heads; if n is no power of two, the series of
    the power below, then every other number of the power above.
    """
    series = 2 ** math.floor(math.log2(num_heads))
    number = torch.arange(1, num_heads + 1, dtype=torch.float64, device=device)
    # Half steps are the odd members of the series of twice as many heads.
    step = torch.where(number <= series, number, number - series - 0.5)
    return torch.exp2(-8 / series * step)


def num_channels(dtype: torch.dtype) -> int:
    """Return the number of channels that ``with_distances`` adds."""
    return _NARROW_CHANNELS if dtype in _DIGITS else 1


def with_distances(
    q: Float[Tensor, "S B N H"],
    k: Float[Tensor, "Z B G H"],
    v: Float[Tensor, "Z B G J"],
    slopes: Float[Tensor, " N"],
    scale: float,
) -> tuple[Float[Tensor, "S B N I"], Float[Tensor, "Z B G I"], Float[Tensor, "Z B G K"]]:
    """Return q, k and v with channels appended that add slope times key position to scores.

    Args:
        q: queries.
        k: keys.
        v: values, to which as many channels of zeros are appended; the caller must drop these
            channels from the result.
        slopes: of the heads of ``q``.
        scale: factor that the kernel applies to scores.
    """
    key_positions = torch.arange(k.shape[0], device=k.device)
    factors, dtype, more = slopes / scale, q.dtype, num_channels(q.dtype)
    if dtype not in _DIGITS:
        of_heads, of_keys = factors[:, None].to(dtype), key_positions[:, None].to(dtype)
    else:
        # slope * position = sum of (part * worth) * digit over slope parts and digits. A slope
        # is the sum of a rounded part and the remainder, a position the sum of its digits in
        # base 256 or 2048 times their place values (worths). Each product of two channels is
        # exact in the accumulator.
        digits, lift = _DIGITS[dtype], _LIFT[dtype]
        lifts = (1, *(lift for _ in digits[1:]))
        coarse = factors.to(dtype)
        parts = coarse, (factors - coarse).to(dtype)
        # The key contains a factor (lift) of an upper digit's place value, so that the query's
        # channel does not overflow.
        worths = [worth / up for worth, up in zip(digits, lifts, strict=True)]
        of_heads = torch.stack([part * worth for part in parts for worth in worths], -1)
        bounds = (*digits[1:], 2**62)
        rows = zip(digits, bounds, lifts, strict=True)
        key_digits = [key_positions % above // worth * up for worth, above, up in rows]
        of_keys = torch.stack(key_digits * 2, -1).to(dtype)  # once for each slope part
        missing = more - of_keys.shape[-1]
        of_heads, of_keys = F.pad(of_heads, (0, missing)), F.pad(of_keys, (0, missing))
    of_heads = of_heads.expand(*q.shape[:2], -1, -1)
    of_keys = of_keys[:, None, None].expand(*k.shape[:3], -1)
    return torch.cat([q, of_heads], -1), torch.cat([k, of_keys], -1), F.pad(v, (0, more))
