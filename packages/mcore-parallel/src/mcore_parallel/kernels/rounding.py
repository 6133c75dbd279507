"""Triton kernel that rounds float32 to bfloat16 stochastically, in one pass.

Each number is read once and written once, where plain torch makes some twenty passes. The
reference is ``optimizers.rounding.round_stochastically_plain``, whose bits these are; this
module is imported only where tensors are on a GPU.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

_BLOCK = 2048


@triton.jit(do_not_specialize=["salt"])
@no_type_check
def _round(wide, target, salt, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    number = tl.load(wide + at, mask=inside, other=0.0).to(tl.uint32, bitcast=True)
    noise = number ^ salt.to(tl.uint32)
    noise = (noise ^ (noise >> 16)) * 0x85EBCA6B
    noise = (noise ^ (noise >> 13)) * 0xC2B2AE35
    noise = (noise ^ (noise >> 16)) & 0xFFFF
    # The upper half alone is left, which bfloat16 holds as it is.
    upper = ((number + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
    tl.store(target + at, upper.to(target.dtype.element_ty), mask=inside)


def fused_round(target: Float[Tensor, " n"], wide: Float[Tensor, " n"], salt: int) -> None:
    """Round ``wide`` into ``target`` in place.

    Args:
        target: bfloat16, contiguous.
        wide: float32, contiguous.
        salt: what the noise follows from beside the numbers; 31 bits.
    """
    size = wide.numel()
    if size:
        _round[(triton.cdiv(size, _BLOCK),)](wide, target, salt, size, _BLOCK)
