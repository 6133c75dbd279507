"""Rotary embedding: in plain torch, and fused with the split of q·k·v in one Triton kernel.

The kernel reads and writes every number once, forward and backward, at memory bandwidth. Code
compiled by torch reaches a third of the bandwidth, because the gradient is a concatenation.
"""

from collections.abc import Iterator
from typing import Any, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.optional_kernels import (
    Sample,
    optional_kernel,
    sine_leaf,
    tl,
    triton,
    wave,
)

RotaryTables = tuple[Tensor, Tensor]
"""Cosine and sine of every position's angles, each ``[S, h]``, or ``[S, B, h]`` if the
sequences of a batch have different positions; h is half the rotated channels."""


def rotate(
    x: Float[Tensor, "S B N H"], tables: RotaryTables, interleaved: bool = False
) -> Float[Tensor, "S B N H"]:
    """Return x with the first 2h channels of every head rotated by the tokens' positions.

    Args:
        x: queries or keys.
        tables: cosine and sine of the positions of x.
        interleaved: whether pairs are neighbouring channels, not channels i and i + h.
    """
    cos, sin = (_for_heads(table) for table in tables)
    size = 2 * cos.shape[-1]
    rotated, rest = x[..., :size].to(cos.dtype), x[..., size:]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = rotated.chunk(2, -1)
        out = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    out = out.to(x.dtype)
    return torch.cat([out, rest], -1) if rest.shape[-1] else out


def _for_heads(table: Tensor) -> Tensor:
    """Return a table with the dimensions ``[S, B, N, h]``, B and N of size 1 if shared."""
    return table.unsqueeze(-2) if table.dim() == 3 else table[:, None, None]


@triton.jit
@no_type_check
def _rotate(
    packed, q, k, v, cos, sin, batch, n, g, half,
    INVERSE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # One program: HEADS heads of one token. Forward reads packed and writes q, k, v;
    # backward reads their gradients, rotates back, and writes packed.
    token = tl.program_id(0).to(tl.int64)
    position = token // batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    heads = n + 2 * g
    size = 2 * half
    inside = (head < heads) & (lane < half)
    is_q = head < n
    is_k = (head >= n) & (head < n + g)
    is_v = (head >= n + g) & (head < heads)
    at_packed = packed + (token * heads + head) * size + lane
    at_q = q + (token * n + head) * size + lane
    at_k = k + (token * g + head - n) * size + lane
    at_v = v + (token * g + head - n - g) * size + lane
    # Values are not rotated: cosine 1 and sine 0 below. Each head is in one of three outputs:
    # in backward two of the three masked loads are zeros, so the sum is the third.
    c = tl.load(cos + position * half + lane, mask=lane < half, other=1.0)
    s = tl.load(sin + position * half + lane, mask=lane < half, other=0.0)
    kind = packed.dtype.element_ty
    if INVERSE:
        low = tl.load(at_q, mask=inside & is_q, other=0.0)
        low += tl.load(at_k, mask=inside & is_k, other=0.0)
        low += tl.load(at_v, mask=inside & is_v, other=0.0)
        high = tl.load(at_q + half, mask=inside & is_q, other=0.0)
        high += tl.load(at_k + half, mask=inside & is_k, other=0.0)
        high += tl.load(at_v + half, mask=inside & is_v, other=0.0)
        s = -s
    else:
        low = tl.load(at_packed, mask=inside, other=0.0)
        high = tl.load(at_packed + half, mask=inside, other=0.0)
    a = low.to(tl.float32)
    b = high.to(tl.float32)
    c = tl.where(is_v, 1.0, c)
    s = tl.where(is_v, 0.0, s)
    low = (a * c - b * s).to(kind)
    high = (b * c + a * s).to(kind)
    if INVERSE:
        tl.store(at_packed, low, mask=inside)
        tl.store(at_packed + half, high, mask=inside)
    else:
        tl.store(at_q, low, mask=inside & is_q)
        tl.store(at_q + half, high, mask=inside & is_q)
        tl.store(at_k, low, mask=inside & is_k)
        tl.store(at_k + half, high, mask=inside & is_k)
        tl.store(at_v, low, mask=inside & is_v)
        tl.store(at_v + half, high, mask=inside & is_v)


class _RotarySplit(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, n: int, g: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        seq, batch, width = qkv.shape
        size = width // (n + 2 * g)
        q = qkv.new_empty(seq, batch, n, size)
        k = qkv.new_empty(seq, batch, g, size)
        v = qkv.new_empty(seq, batch, g, size)
        ctx.save_for_backward(cos, sin)
        _launch_rotate(qkv, q, k, v, cos, sin)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        seq, batch, n, size = dq.shape
        packed = dq.new_empty(seq, batch, (n + 2 * dk.shape[2]) * size)
        grads = dq.contiguous(), dk.contiguous(), dv.contiguous()
        _launch_rotate(packed, *grads, cos, sin, inverse=True)
        return packed, None, None, None, None


def _launch_rotate(
    packed: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    inverse: bool = False,
) -> None:
    """Fill q, k and v from ``packed``; with ``inverse``, ``packed`` from their gradients."""
    seq, batch, n, size = q.shape
    g, half = k.shape[2], size // 2
    heads = 16  # a thread of 4 warps then moves 16 bytes at a time
    grid = (seq * batch, triton.cdiv(n + 2 * g, heads))
    _rotate[grid](
        packed,
        q,
        k,
        v,
        cos,
        sin,
        batch,
        n,
        g,
        half,
        inverse,
        triton.next_power_of_2(half),
        heads,
        num_warps=4,
    )


def _split_plain(
    qkv: Float[Tensor, "S B X"],
    cos: Float[Tensor, "S H2"],
    sin: Float[Tensor, "S H2"],
    num_heads: int,
    num_groups: int,
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "S B G H"], Float[Tensor, "S B G H"]]:
    heads = num_heads, num_groups, num_groups
    q, k, v = qkv.unflatten(-1, (sum(heads), -1)).split(heads, 2)
    return rotate(q, (cos, sin)), rotate(k, (cos, sin)), v


def kind_of_heads(
    qkv: Tensor, size: int, tables: RotaryTables
) -> tuple[torch.dtype, int] | None:
    """Return the key of kernels that split and rotate; None for unsupported tensors.

    Args:
        qkv: input of the kernels.
        size: channels of a head.
        tables: cosine and sine; tables with a batch dimension are unsupported.
    """
    is_fit = qkv.dtype != torch.float64 and tables[0].dim() == 2
    return (qkv.dtype, size) if is_fit else None


def _samples(
    device: torch.device, dtype: torch.dtype = torch.float32, size: int = 10
) -> Iterator[Sample]:
    tables = (wave(3, size // 2, device=device, dtype=torch.float32) for _ in range(2))
    yield Sample(sine_leaf(3, 2, 4 * size, device=device, dtype=dtype), *tables, 2, 1)


@optional_kernel(
    "rotary embedding in Triton",
    reference=_split_plain,
    kind=lambda qkv, cos, sin, num_heads, num_groups: kind_of_heads(
        qkv, qkv.shape[-1] // (num_heads + 2 * num_groups), (cos, sin)
    ),
    samples=_samples,
)
def rotary_split(
    qkv: Float[Tensor, "S B X"],
    cos: Float[Tensor, "S H2"],
    sin: Float[Tensor, "S H2"],
    num_heads: int,
    num_groups: int,
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "S B G H"], Float[Tensor, "S B G H"]]:
    """Return q, k and v as heads from a fused q·k·v, with q and k rotated by position.

    Args:
        qkv: contiguous, [q heads; k groups; v groups] in its last dimension.
        cos: cosine for each position and pair, float32; pair i is channels i and i + H/2.
        sin: sine, in the same form.
        num_heads: N, query heads on this rank.
        num_groups: G, key/value heads on this rank.

    Reference:
        Su et al. 2021, RoFormer, arXiv:2104.09864, in the rotate-half layout.
    """
    tables = cos.contiguous(), sin.contiguous()
    return _RotarySplit.apply(qkv.contiguous(), *tables, num_heads, num_groups)
