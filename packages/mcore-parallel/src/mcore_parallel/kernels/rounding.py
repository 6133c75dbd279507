"""Stochastic rounding of float32 to bfloat16: Triton kernel and reference.

A number between two neighbouring bfloat16 numbers is rounded up with a probability equal to its
relative distance from the lower one, so the sum of many small updates is right on average. The
noise is a hash of the number's bits and the step: there is no random state, and every layout
rounds a number in the same way. The kernel reads and writes each number once, while plain torch
needs about twenty passes.

Gupta et al. 2015, arXiv:1502.02551, section 3.1; the mixing of bits is MurmurHash3's.
"""

from collections.abc import Iterator
from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave

_BLOCK = 2048
_MULTIPLIERS = (-2048144789, -1028477387)  # 0x85EBCA6B and 0xC2B2AE35 as signed numbers
_SHIFTS = (16, 13, 16)
_LOW_BITS = 0xFFFF


def round_stochastically_(
    target: Float[Tensor, " n"], wide: Float[Tensor, " n"], step: int
) -> None:
    """Round ``wide`` stochastically and write it to ``target``.

    Kernel and reference give the same bits. Numbers that bfloat16 represents do not change.

    Args:
        target: bfloat16; overwritten.
        wide: float32; finite.
        step: selects the noise, so that each step rounds independently.
    """
    round_by_salt_(target, wide, step * 0x9E3779B1 & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["salt"])
@no_type_check
def _round(wide, target, salt, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    number = tl.load(wide + index, mask=inside, other=0.0).to(tl.uint32, bitcast=True)
    noise = number ^ salt.to(tl.uint32)
    noise = (noise ^ (noise >> 16)) * 0x85EBCA6B
    noise = (noise ^ (noise >> 13)) * 0xC2B2AE35
    noise = (noise ^ (noise >> 16)) & 0xFFFF
    # Adding 16 random bits carries into the upper half with probability lower half / 2^16. With
    # the lower half cleared, the conversion to bfloat16 is exact.
    upper = ((number + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
    tl.store(target + index, upper.to(target.dtype.element_ty), mask=inside)


def _round_plain(target: Float[Tensor, " n"], wide: Float[Tensor, " n"], salt: int) -> None:
    bits = wide.view(torch.int32)
    noise = _mix_(bits ^ salt).bitwise_and_(_LOW_BITS)
    # Carries into the upper half with probability lower half / 2^16.
    rounded = noise.add_(bits).bitwise_and_(~_LOW_BITS)
    target.copy_(rounded.view(torch.float32))


def _mix_(bits: Tensor) -> Tensor:
    """Mix the bits of every number, in place; int32 wraps around."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        bits ^= (bits >> shift) & (2 ** (32 - shift) - 1)  # the mask makes the shift unsigned
        bits *= multiplier
    return bits


def _samples(device: torch.device) -> Iterator[Sample]:
    wide = wave(4099, device=device, dtype=torch.float32)
    yield Sample(torch.zeros_like(wide, dtype=torch.bfloat16), wide, 12345)


@optional_kernel(
    "stochastic rounding in Triton",
    reference=_round_plain,
    kind=lambda: (),
    samples=_samples,
)
def round_by_salt_(target: Float[Tensor, " n"], wide: Float[Tensor, " n"], salt: int) -> None:
    """Round ``wide`` to ``target``, with noise hashed from each number's bits and a salt.

    Args:
        target: bfloat16, contiguous.
        wide: float32, contiguous.
        salt: 31 bits.
    """
    size = wide.numel()
    if size:
        _round[(triton.cdiv(size, _BLOCK),)](wide, target, salt, size, _BLOCK)
