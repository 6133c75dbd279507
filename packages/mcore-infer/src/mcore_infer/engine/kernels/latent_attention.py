"""Triton kernel of decoding with multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

The cache has one vector for each token, a latent part and a rotated part, which all heads read.
A program loads the vector once for a block of heads: both parts are the key, and the latent
part is the value. Splits are those of ``paged_attention``; the grid does not depend on lengths.
Imported only if tensors are on a GPU.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from mcore_infer.engine.kernels.paged_attention import (
    _join,
    _keys_of_split,
    _mix,
    _nothing,
    _places,
    _store_part,
    num_splits,
)
from mcore_parallel.optional_kernels import OptionalKernel, wave

_MOST_HEADS = 32
"""Most heads of one program, whose accumulators fill the registers."""


@triton.jit
@no_type_check
def _attend_latent(
    q, keys, tables, lengths, out, parts, sums, scale, table_size, N: tl.constexpr,
    H: tl.constexpr, J: tl.constexpr, Z: tl.constexpr, LATENT: tl.constexpr,
    ROTATED: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # One program: a block of heads of one request, over one split of its keys.
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + request)
    begin, end = _keys_of_split(length, 0, split, KEYS, SPLITS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    # ``lane``: channels of the latent part; ``more``: channels of the rotated part.
    is_head, lane, more = head < N, tl.arange(0, LATENT), tl.arange(0, ROTATED)
    queries = q + (request * N + head[:, None]) * H
    query = tl.load(
        queries + lane[None, :], mask=is_head[:, None] & (lane < J)[None, :], other=0.0
    )
    inside = is_head[:, None] & (more < H - J)[None, :]
    rotated_query = tl.load(queries + J + more[None, :], mask=inside, other=0.0)
    top, total, mixed = _nothing(sums, head, is_head, split, HEADS, LATENT, HAS_SINKS=False)
    for start in range(begin, end, KEYS):
        is_seen = (start + tl.arange(0, KEYS) < end)[:, None]
        at = keys + _places(tables + request * table_size, start, end, Z, KEYS)[:, None] * H
        latent = tl.load(at + lane[None, :], mask=is_seen & (lane < J)[None, :], other=0.0)
        rotated = tl.load(
            at + J + more[None, :], mask=is_seen & (more < H - J)[None, :], other=0.0
        )
        # Scores are the sum of the products of both parts, as [keys, heads].
        score = tl.dot(latent, tl.trans(query), input_precision=PRECISION)
        score = tl.dot(rotated, tl.trans(rotated_query), score, input_precision=PRECISION)
        score = tl.where(is_seen, score * scale, float("-inf"))
        top, total, mixed = _mix(score, latent, top, total, mixed, PRECISION)
    if SPLITS == 1:
        places = out + (request * N + head)[None, :] * J + lane[:, None]
        result = (mixed / total[None, :]).to(out.dtype.element_ty)
        tl.store(places, result, mask=is_head[None, :] & (lane < J)[:, None])
    else:
        at_part = (request * N + head) * SPLITS + split
        _store_part(parts, sums, at_part, is_head, lane, mixed, top, total, J)


def latent_decode(
    q: Float[Tensor, "R N H"],
    keys: Float[Tensor, "P Z 1 H"],
    tables: Int[Tensor, "R M"],
    lengths: Int[Tensor, " R"],
    value_dim: int,
) -> Float[Tensor, "R N J"]:
    """Attend with one query of each request to all its keys, including the last.

    Never waits for the device, and the launch depends on shapes alone: a CUDA graph may hold
    it.

    Args:
        q: queries; R requests. Scores are scaled by 1/sqrt(H).
        keys: cached vectors in pages of Z tokens.
        tables: pages of each request, in order; at least the pages of its keys.
        lengths: number of keys of each request.
        value_dim: J, the first channels of a key that are its value.
    """
    (R, N, H), Z = q.shape, keys.shape[1]
    heads = max(8, min(_MOST_HEADS, triton.next_power_of_2(N)))
    blocks = triton.cdiv(N, heads)
    splits = num_splits(R * blocks)
    lanes = triton.next_power_of_2(value_dim)
    out = torch.empty(R, N, value_dim, dtype=q.dtype, device=q.device)
    parts = sums = out
    if splits > 1:
        parts = torch.empty(R, N, splits, value_dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(R, N, splits, dtype=torch.float32, device=q.device)
    _attend_latent[(R, blocks, splits)](
        q.contiguous(),
        keys,
        tables,
        lengths,
        out,
        parts,
        sums,
        H**-0.5,
        tables.shape[1],
        N=N,
        H=H,
        J=value_dim,
        Z=Z,
        LATENT=lanes,
        ROTATED=max(16, triton.next_power_of_2(H - value_dim)),
        HEADS=heads,
        KEYS=128 // q.element_size(),
        SPLITS=splits,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4 if heads <= 16 else 8,  # pyrefly: ignore
        num_stages=2,  # pyrefly: ignore
    )
    if splits > 1:
        _join[(R * N,)](parts, sums, out, value_dim, lanes, splits, num_warps=1)
    return out


def _trial(
    device: torch.device, dtype: torch.dtype, num_heads: int, width: int, value_dim: int
) -> list[tuple[Tensor, Tensor]]:
    from mcore_infer.engine.plain_attention import reference_decode

    q = wave(3, num_heads, width, device=device, dtype=dtype)
    keys = wave(9, 32, 1, width, device=device, dtype=dtype)
    tables = torch.tensor([[8, 1, 5], [2, 0, 0], [3, 7, 4]], device=device)
    lengths = torch.tensor([70, 1, 96], device=device)
    reference = reference_decode(q, keys, keys[..., :value_dim], tables, lengths)
    return [(latent_decode(q, keys, tables, lengths, value_dim), reference)]


LATENT_KERNEL = OptionalKernel("the kernel of latent decoding", ("triton",), _trial)
"""Kind: dtype, heads, channels of a key, channels of a value."""
