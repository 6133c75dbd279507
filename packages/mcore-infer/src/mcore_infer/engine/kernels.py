"""Triton kernel of decoding: one query a request attends to keys and values in pages.

It writes the new key and value to their place first. The keys of a request are cut into splits
that are read at the same time, each with its own maximum and sum; a second kernel joins them
(flash decoding, Dao et al. 2023). The grid does not depend on lengths, so a CUDA graph can hold
it. Imported only where tensors are on a GPU.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.optional_kernels import OptionalKernel, wave

_KEYS = 64
_PROGRAMS = 264  # twice the multiprocessors of an H100 or H200
_MOST_SPLITS = 32


@triton.jit
@no_type_check
def _keys_of_split(length, window, split, KEYS: tl.constexpr, SPLITS: tl.constexpr):
    # The first key of a split and the one behind its last; a split may be empty.
    first = tl.maximum(0, tl.where(window < 0, 0, length - 1 - window))
    first = first // KEYS * KEYS
    size = tl.cdiv(tl.cdiv(length - first, SPLITS), KEYS) * KEYS
    begin = first + split * size
    return begin, tl.minimum(length, begin + size)


@triton.jit
@no_type_check
def _place(table, position, Z: tl.constexpr):
    # Of a request's token in the memory of all pages.
    return tl.load(table + position // Z).to(tl.int64) * Z + position % Z


@triton.jit
@no_type_check
def _copy_row(source, target, H: tl.constexpr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    tl.store(target + lane, tl.load(source + lane, mask=lane < H), mask=lane < H)


@triton.jit
@no_type_check
def _mix(score, value, top, total, mixed, PRECISION: tl.constexpr):
    # Add keys to the running maximum, the sum of weights and the weighted values.
    new_top = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing is seen yet
    weight = tl.exp(score - safe[:, None])
    shrink = tl.exp(top - safe)
    total = total * shrink + tl.sum(weight, 1)
    weight = weight.to(value.dtype)
    mixed = tl.dot(weight, value, mixed * shrink[:, None], input_precision=PRECISION)
    return new_top, total, mixed


@triton.jit
@no_type_check
def _attend(
    q,
    new_keys,
    new_values,
    keys,
    values,
    tables,
    lengths,
    parts,
    sums,
    scale,
    window,
    table_size,
    new_key_stride,
    new_value_stride,
    N: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    Z: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program: the heads of one group of one request, over one split of its keys.
    request, group, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + request)
    begin, end = _keys_of_split(length, window, split, KEYS, SPLITS)
    row, lane = tl.arange(0, HEADS), tl.arange(0, LANES)
    if (begin < length) & (length <= end):
        last = (_place(tables + request * table_size, length - 1, Z) * G + group) * H
        _copy_row(new_keys + request * new_key_stride + group * H, keys + last, H, LANES)
        _copy_row(new_values + request * new_value_stride + group * H, values + last, H, LANES)
    tl.debug_barrier()  # the loop below reads them
    head = group * (N // G) + row
    inside = (row[:, None] < N // G) & (lane[None, :] < H)
    at_query = (request * N + head[:, None]) * H + lane[None, :]
    query = tl.load(q + at_query, mask=inside, other=0.0)
    top, total = tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, LANES], tl.float32)
    for start in range(begin, end, KEYS):
        place = start + tl.arange(0, KEYS)
        is_key = place < end
        known = tl.minimum(place, end - 1)
        at = (_place(tables + request * table_size, known, Z) * G + group) * H
        seen = is_key[:, None] & (lane[None, :] < H)
        key = tl.load(keys + at[:, None] + lane[None, :], mask=seen, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        is_seen = is_key & ((window < 0) | (place >= length - 1 - window))
        score = tl.where(is_seen[None, :], score, float("-inf"))
        value = tl.load(values + at[:, None] + lane[None, :], mask=seen, other=0.0)
        # Pages out of the window may be another request's: even a NaN there must weigh nothing.
        value = tl.where(is_seen[:, None], value, 0.0)
        top, total, mixed = _mix(score, value, top, total, mixed, PRECISION)
    at_part = (request * N + head) * SPLITS + split
    some = tl.where(total > 0.0, total, 1.0)
    tl.store(parts + at_part[:, None] * H + lane[None, :], mixed / some[:, None], mask=inside)
    log_sum = tl.where(total > 0.0, top + tl.log(some), float("-inf"))
    tl.store(sums + at_part, log_sum, mask=row < N // G)


@triton.jit
@no_type_check
def _join(parts, sums, out, H: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr):
    # One program: one head of one request.
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    lane = tl.arange(0, LANES)
    log_sum = tl.load(sums + head * SPLITS + split)
    weight = tl.exp(log_sum - tl.max(log_sum, 0))
    weight = weight / tl.sum(weight, 0)
    at = parts + (head * SPLITS + split[:, None]) * H + lane[None, :]
    part = tl.load(at, mask=lane[None, :] < H, other=0.0)
    mixed = tl.sum(part * weight[:, None], 0)
    tl.store(out + head * H + lane, mixed.to(out.dtype.element_ty), mask=lane < H)


def paged_decode(
    q: Float[Tensor, "R N H"],
    k: Float[Tensor, "R G H"],
    v: Float[Tensor, "R G H"],
    keys: Float[Tensor, "P Z G H"],
    values: Float[Tensor, "P Z G H"],
    tables: Int[Tensor, "R M"],
    lengths: Int[Tensor, " R"],
    *,
    window: int = -1,
    scale: float | None = None,
) -> Float[Tensor, "R N H"]:
    """Write a new key and value of each request; let its one query attend to all it has.

    Waits for nothing and takes shapes alone, so a CUDA graph may hold it.

    Args:
        q: queries; R requests.
        k: the last key of each request.
        v: the last value of each request.
        keys: in pages of Z tokens; changed.
        values: in the same pages; changed.
        tables: pages of each request, in order; at least those of its keys that are seen.
        lengths: keys of each request, the new one included.
        window: earlier keys that a query sees besides its own; -1: all.
        scale: of the scores; None: 1/sqrt(H).
    """
    R, N, H = q.shape
    _, Z, G, _ = keys.shape
    splits = max(1, min(_MOST_SPLITS, _PROGRAMS // (R * G)))
    splits = 1 << (splits.bit_length() - 1)
    lanes = triton.next_power_of_2(max(16, H))
    parts = torch.empty(R, N, splits, H, dtype=torch.float32, device=q.device)
    sums = torch.empty(R, N, splits, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k, v = (new if new.stride()[1:] == (H, 1) else new.contiguous() for new in (k, v))
    _attend[(R, G, splits)](
        q.contiguous(),
        k,
        v,
        keys,
        values,
        tables,
        lengths,
        parts,
        sums,
        H**-0.5 if scale is None else scale,
        window,
        tables.shape[1],
        k.stride(0),
        v.stride(0),
        N=N,
        G=G,
        H=H,
        Z=Z,
        LANES=lanes,
        HEADS=max(16, triton.next_power_of_2(N // G)),
        KEYS=_KEYS,
        SPLITS=splits,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
    )
    _join[(R * N,)](parts, sums, out, H=H, LANES=lanes, SPLITS=splits, num_warps=1)
    return out


def _trial(
    device: torch.device, dtype: torch.dtype, head_dim: int, group: int
) -> list[tuple[Tensor, Tensor]]:
    from mcore_infer.engine.paged import reference_decode, write_to_pages

    q = wave(3, 2 * group, head_dim, device=device, dtype=dtype)
    k, v = wave(2, 3, 2, head_dim, device=device, dtype=dtype)
    keys, values = wave(2, 9, 32, 2, head_dim, device=device, dtype=dtype)
    tables = torch.tensor([[8, 1, 5], [2, 0, 0], [3, 7, 4]], device=device)
    lengths = torch.tensor([70, 1, 96], device=device)
    places = torch.tensor([5 * 32 + 5, 2 * 32, 4 * 32 + 31], device=device)
    pairs = []
    for window in (-1, 40):
        own_keys, own_values = keys.clone(), values.clone()
        new: Any = (q, k, v, own_keys, own_values, tables, lengths)
        got = paged_decode(*new, window=window)
        write_to_pages((keys, values), (k, v), places)
        want = reference_decode(q, keys, values, tables, lengths, window=window)
        pairs += [(got, want), (own_keys, keys.clone()), (own_values, values.clone())]
    return pairs


DECODE_KERNEL = OptionalKernel("the paged decoding kernel", ("triton",), _trial)
"""Kind: dtype, channels of a head, query heads of a group."""
