"""Split of q·k·v with norm and rotation of queries and keys: Triton kernels and reference.

Forward and backward read and write every number once. Norm and rotation are computed in float32
without rounding in between. The gradients of the two weights are sums over tokens and heads in
a fixed order.
"""

from collections.abc import Iterator
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_models.kernels.rope import kind_of_heads, rotate
from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.optional_kernels import (
    Sample,
    optional_kernel,
    sine_leaf,
    tl,
    triton,
    wave,
)

_HEADS = 16  # of one program
_TOKENS = 4  # of one program in backward, which sums over them


@triton.jit
@no_type_check
def _weights(q_weight, k_weight, is_q, is_k, lane, inside, offset):
    """Return the norm's weight for each head and lane; 1 for values."""
    of_q = tl.load(q_weight + lane, mask=inside & is_q, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + lane, mask=inside & is_k, other=0.0).to(tl.float32)
    return tl.where(is_q | is_k, of_q + of_k + offset, 1.0)


@triton.jit
@no_type_check
def _turn(cos, sin, position, lane, half, is_v):
    """Return cosine and sine of each head's angles; values are not rotated."""
    c = tl.load(cos + position * half + lane, mask=lane < half, other=1.0)
    s = tl.load(sin + position * half + lane, mask=lane < half, other=0.0)
    return tl.where(is_v, 1.0, c), tl.where(is_v, 0.0, s)


@triton.jit
@no_type_check
def _forward(
    packed,
    q,
    k,
    v,
    q_weight,
    k_weight,
    cos,
    sin,
    batch,
    n,
    g,
    half,
    epsilon,
    offset,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    # One program: HEADS heads of one token.
    token = tl.program_id(0).to(tl.int64)
    position = token // batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    heads, size = n + 2 * g, 2 * half
    inside = (head < heads) & (lane < half)
    is_q = head < n
    is_k = (head >= n) & (head < n + g)
    is_v = (head >= n + g) & (head < heads)
    at = packed + (token * heads + head) * size + lane
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1))[:, None] / size
    scale = tl.where(is_v, 1.0, tl.rsqrt(mean + epsilon))
    a *= scale * _weights(q_weight, k_weight, is_q, is_k, lane, inside, offset)
    b *= scale * _weights(q_weight + half, k_weight + half, is_q, is_k, lane, inside, offset)
    c, s = _turn(cos, sin, position, lane, half, is_v)
    kind = packed.dtype.element_ty
    low, high = (a * c - b * s).to(kind), (b * c + a * s).to(kind)
    at_q = q + (token * n + head) * size + lane
    at_k = k + (token * g + head - n) * size + lane
    at_v = v + (token * g + head - n - g) * size + lane
    tl.store(at_q, low, mask=inside & is_q)
    tl.store(at_q + half, high, mask=inside & is_q)
    tl.store(at_k, low, mask=inside & is_k)
    tl.store(at_k + half, high, mask=inside & is_k)
    tl.store(at_v, low, mask=inside & is_v)
    tl.store(at_v + half, high, mask=inside & is_v)


@triton.jit
@no_type_check
def _load_gradient(dq, dk, dv, token, head, lane, n, g, half, inside):
    """Return both halves of the gradients of some heads, from q's, k's or v's tensor."""
    is_q = inside & (head < n)
    is_k = inside & (head >= n) & (head < n + g)
    is_v = inside & (head >= n + g)
    at_q = dq + (token * n + head) * 2 * half + lane
    at_k = dk + (token * g + head - n) * 2 * half + lane
    at_v = dv + (token * g + head - n - g) * 2 * half + lane
    low = tl.load(at_q, mask=is_q, other=0.0)
    low += tl.load(at_k, mask=is_k, other=0.0)
    low += tl.load(at_v, mask=is_v, other=0.0)
    high = tl.load(at_q + half, mask=is_q, other=0.0)
    high += tl.load(at_k + half, mask=is_k, other=0.0)
    high += tl.load(at_v + half, mask=is_v, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
@no_type_check
def _store_sums(place, low_sum, high_sum, is_head, half, HALF: tl.constexpr):
    """Store the sums over the selected heads, of both halves."""
    lane = tl.arange(0, HALF)
    tl.store(place + lane, tl.sum(tl.where(is_head, low_sum, 0.0), 0), mask=lane < half)
    place += half
    tl.store(place + lane, tl.sum(tl.where(is_head, high_sum, 0.0), 0), mask=lane < half)


@triton.jit
@no_type_check
def _backward(
    packed,
    dq,
    dk,
    dv,
    dpacked,
    dweights,
    q_weight,
    k_weight,
    cos,
    sin,
    num_tokens,
    batch,
    n,
    g,
    half,
    epsilon,
    offset,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    # One program: HEADS heads of TOKENS tokens, and their share of dweights[program, 4, half]:
    # the two halves of q's weight, then those of k's.
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    heads, size = n + 2 * g, 2 * half
    inside = (head < heads) & (lane < half)
    is_q = head < n
    is_k = (head >= n) & (head < n + g)
    is_v = (head >= n + g) & (head < heads)
    low_weight = _weights(q_weight, k_weight, is_q, is_k, lane, inside, offset)
    high_weight = _weights(q_weight + half, k_weight + half, is_q, is_k, lane, inside, offset)
    low_sum = tl.zeros((HEADS, HALF), dtype=tl.float32)
    high_sum = tl.zeros((HEADS, HALF), dtype=tl.float32)
    kind = dpacked.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * TOKENS
    for token in range(first, tl.minimum(first + TOKENS, num_tokens)):
        position = token // batch
        c, s = _turn(cos, sin, position, lane, half, is_v)
        at = (token * heads + head) * size + lane
        low, high = _load_gradient(dq, dk, dv, token, head, lane, n, g, half, inside)
        # Gradient before the rotation, which is orthogonal: rotate back.
        turned_low, turned_high = low * c + high * s, high * c - low * s
        a = tl.load(packed + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(packed + at + half, mask=inside, other=0.0).to(tl.float32)
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1))[:, None] / size
        scale = tl.rsqrt(mean + epsilon)
        a, b = a * scale, b * scale
        low_sum += turned_low * a
        high_sum += turned_high * b
        # RMSNorm with n = x * scale: dx = scale * (dn - n * mean(dn * n)).
        low, high = turned_low * low_weight, turned_high * high_weight
        along = (tl.sum(low * a, 1) + tl.sum(high * b, 1))[:, None] / size
        low = tl.where(is_v, low, scale * (low - a * along))
        high = tl.where(is_v, high, scale * (high - b * along))
        tl.store(dpacked + at, low.to(kind), mask=inside)
        tl.store(dpacked + at + half, high.to(kind), mask=inside)
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    place = dweights + program * 4 * half
    _store_sums(place, low_sum, high_sum, is_q, half, HALF)
    _store_sums(place + 2 * half, low_sum, high_sum, is_k, half, HALF)


class _NormRotarySplit(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        sizes: tuple[int, int],
        epsilon: float,
        offset: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        (n, g), (seq, batch, width) = sizes, qkv.shape
        size = width // (n + 2 * g)
        q, k, v = (qkv.new_empty(seq, batch, heads, size) for heads in (n, g, g))
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.sizes, ctx.constants = sizes, (epsilon, offset)
        grid = (seq * batch, triton.cdiv(n + 2 * g, _HEADS))
        if seq * batch:
            half = size // 2
            lanes = triton.next_power_of_2(half)
            _forward[grid](
                *(qkv, q, k, v, q_weight, k_weight, cos, sin),
                *(batch, n, g, half, epsilon, offset, lanes, _HEADS),
            )
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> Any:
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        (n, g), (seq, batch, width) = ctx.sizes, qkv.shape
        half = width // (n + 2 * g) // 2
        grid = (-(-seq * batch // _TOKENS), -(-(n + 2 * g) // _HEADS))
        dqkv = torch.empty_like(qkv)
        parts = qkv.new_empty(grid[0] * grid[1], 4, half, dtype=torch.float32)
        grads = dq.contiguous(), dk.contiguous(), dv.contiguous()
        if seq * batch:
            lanes = triton.next_power_of_2(half)
            _backward[grid](
                *(qkv, *grads, dqkv, parts, q_weight, k_weight, cos, sin, seq * batch),
                *(batch, n, g, half, *ctx.constants, lanes, _HEADS, _TOKENS),
            )
        of_q, of_k = parts.sum(0).view(2, 2 * half).to(q_weight.dtype)
        return dqkv, of_q, of_k, None, None, None, None, None


def _plain(
    qkv: Float[Tensor, "S B X"],
    q_weight: Float[Tensor, " H"],
    k_weight: Float[Tensor, " H"],
    cos: Float[Tensor, "S H2"],
    sin: Float[Tensor, "S H2"],
    num_heads: int,
    num_groups: int,
    *,
    epsilon: float,
    offset: float = 0.0,
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "S B G H"], Float[Tensor, "S B G H"]]:
    heads, tables = (num_heads, num_groups, num_groups), (cos, sin)
    q, k, v = qkv.unflatten(-1, (sum(heads), -1)).split(heads, 2)
    # No rounding between norm and rotation.
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    q = F.rms_norm(q, q_weight.shape, q_weight.to(q.dtype) + offset, epsilon)
    k = F.rms_norm(k, k_weight.shape, k_weight.to(k.dtype) + offset, epsilon)
    q, k = rotate(q, tables), rotate(k, tables)
    return q.to(qkv.dtype), k.to(qkv.dtype), v.to(qkv.dtype)


def _samples(
    device: torch.device, dtype: torch.dtype = torch.float32, size: int = 10
) -> Iterator[Sample]:
    tables = (wave(3, size // 2, device=device, dtype=torch.float32) for _ in range(2))
    # Three heads: with two, the test waves cancel in a weight's gradient at 128 channels.
    qkv, *weights = (
        sine_leaf(*shape, device=device, dtype=dtype)
        for shape in ((3, 2, 5 * size), (size,), (size,))
    )
    yield Sample(qkv, *weights, *tables, 3, 1, epsilon=1e-5)


@optional_kernel(
    "norm and rotary embedding in Triton",
    reference=_plain,
    kind=lambda qkv, q_weight, cos, sin: kind_of_heads(qkv, q_weight.shape[0], (cos, sin)),
    samples=_samples,
)
def norm_rotary_split(
    qkv: Float[Tensor, "S B X"],
    q_weight: Float[Tensor, " H"],
    k_weight: Float[Tensor, " H"],
    cos: Float[Tensor, "S H2"],
    sin: Float[Tensor, "S H2"],
    num_heads: int,
    num_groups: int,
    *,
    epsilon: float,
    offset: float = 0.0,
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "S B G H"], Float[Tensor, "S B G H"]]:
    """Return q, k and v as heads from a fused q·k·v, with q and k RMS-normed and rotated.

    Args:
        qkv: contiguous, [q heads; k groups; v groups] in its last dimension.
        q_weight: of the norm of every query head.
        k_weight: of the norm of every key head.
        cos: cosine for each position and pair, float32; pair i is channels i and i + H/2.
        sin: sine, in the same form.
        num_heads: N, query heads on this rank.
        num_groups: G, key/value heads on this rank.
        epsilon: added to the mean square.
        offset: added to both weights.

    Reference:
        Henry et al. 2020, Query-Key Normalization, arXiv:2010.04245; Su et al. 2021,
        RoFormer, arXiv:2104.09864, in the rotate-half layout.
    """
    sizes = num_heads, num_groups
    tables = cos.contiguous(), sin.contiguous()
    return _NormRotarySplit.apply(
        qkv.contiguous(), q_weight, k_weight, *tables, sizes, epsilon, offset
    )
