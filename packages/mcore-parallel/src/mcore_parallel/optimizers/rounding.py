"""Stochastic rounding of float32 to bfloat16.

A number between two of bfloat16 becomes the upper one as often as it is near to it, so that the
sum of many small updates is right on average. Which way it goes follows from its own bits and
the step: no random state is kept, and every layout rounds a number alike.

Gupta et al. 2015, arXiv:1502.02551, section 3.1; the mixing of bits is MurmurHash3's.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.optional_kernels import OptionalKernel, wave, works

_MULTIPLIERS = (-2048144789, -1028477387)  # 0x85EBCA6B and 0xC2B2AE35 as signed numbers
_SHIFTS = (16, 13, 16)
_LOW_BITS = 0xFFFF


def round_stochastically_(
    target: Float[Tensor, " n"], wide: Float[Tensor, " n"], step: int
) -> None:
    """Round into ``target``, in place, by one Triton kernel or plain torch: the same bits.

    Args:
        target: bfloat16.
        wide: float32; finite. Numbers of bfloat16 stay what they are.
        step: others give other roundings.
    """
    salt = step * 0x9E3779B1 & 0x7FFFFFFF
    if wide.is_cuda and works(ROUNDING_KERNEL, wide.device):
        from mcore_parallel.kernels.rounding import fused_round

        fused_round(target, wide, salt)
    else:
        round_stochastically_plain(target, wide, salt)


def round_stochastically_plain(
    target: Float[Tensor, " n"], wide: Float[Tensor, " n"], salt: int
) -> None:
    """Reference of ``kernels.rounding.fused_round`` in plain torch."""
    bits = wide.view(torch.int32)
    noise = _mixed(bits ^ salt).bitwise_and_(_LOW_BITS)
    # Carries into the upper half as often as the lower half is large.
    rounded = noise.add_(bits).bitwise_and_(~_LOW_BITS)
    target.copy_(rounded.view(torch.float32))


def _mixed(bits: Tensor) -> Tensor:
    """Mix the bits of every number, in place; int32 wraps around."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        bits ^= (bits >> shift) & (2 ** (32 - shift) - 1)
        bits *= multiplier
    return bits


def _try_kernel(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    from mcore_parallel.kernels.rounding import fused_round

    wide = wave(4099, device=device, dtype=torch.float32)
    got, want = (torch.zeros_like(wide, dtype=torch.bfloat16) for _ in range(2))
    fused_round(got, wide, 12345)
    round_stochastically_plain(want, wide, 12345)
    return [(got.view(torch.int16), want.view(torch.int16))]


ROUNDING_KERNEL = OptionalKernel("stochastic rounding in Triton", ("triton",), _try_kernel)
