"""The k best experts of each token: Triton kernel (k times the maximum) and reference (sort).

The order is that of a stable descending sort: of equal scores the lower expert first, NaN
before all numbers.
"""

from collections.abc import Iterator
from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave

_TOKENS = 4  # tokens of one program


@triton.jit
@no_type_check
def _top(
    scores,
    ids,
    num_tokens,
    num_experts,
    TOPK: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, LANES)[None, :]
    real = (token < num_tokens)[:, None] & (lane < num_experts)
    score = tl.load(scores + token[:, None] * num_experts + lane, mask=real, other=0.0)
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 equals 0.0: one bit pattern for both
    bits = score.to(tl.int32, bitcast=True)
    # Integers in the order of the floats: IEEE bits of positive numbers are in order; of
    # negative numbers all bits but the sign are flipped. NaN becomes the largest integer.
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, key).to(tl.int64)
    # The low 16 bits hold 65535 - expert: all keys differ, and of equal scores the lower expert
    # has the larger key. Lanes without an expert get a key below all others.
    key = tl.where(lane < num_experts, key * 65536 + (65535 - lane), -(2**62))
    # k times the largest key, which is then removed.
    for j in tl.static_range(TOPK):
        best = tl.max(key, 1)
        expert = 65535 - (best & 65535)
        tl.store(ids + token * TOPK + j, expert, mask=token < num_tokens)
        key = tl.where(lane == expert[:, None], -(2**62), key)


def _top_plain(scores: Float[Tensor, "T E"], topk: int) -> Int[Tensor, "T k"]:
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, :topk]


def _samples(device: torch.device) -> Iterator[Sample]:
    yield Sample(wave(5, 37, device=device, dtype=torch.float32).round(decimals=1), 7)


@optional_kernel(
    "choice of experts in Triton",
    reference=_top_plain,
    kind=lambda scores: () if scores.dtype == torch.float32 else None,
    samples=_samples,
)
def top_experts(scores: Float[Tensor, "T E"], topk: int) -> Int[Tensor, "T k"]:
    """Return the ids of the largest scores, best first; equal scores in order of the id.

    Args:
        scores: E from ``topk`` to 65536.
        topk: number of experts for each token.
    """
    scores = scores.detach()
    num_tokens, num_experts = scores.shape
    ids = torch.empty(num_tokens, topk, dtype=torch.int64, device=scores.device)
    if num_tokens:
        _top[(triton.cdiv(num_tokens, _TOKENS),)](
            scores.contiguous(),
            ids,
            num_tokens,
            num_experts,
            topk,
            _TOKENS,
            triton.next_power_of_2(num_experts),
        )
    return ids
