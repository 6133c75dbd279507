"""Triton kernel of paged decoding: one query of each request attends to keys in pages.

The kernel first writes the new key and value to their page. The keys of a request are cut into
splits that are read in parallel, each with its own running maximum and sum; a second kernel
joins the splits (flash decoding, Dao et al. 2023). The grid does not depend on lengths, so that
a CUDA graph can hold the launch. Imported only if tensors are on a GPU.
"""

from collections.abc import Callable
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mcore_infer.engine.kernels.dequantization import e4m3_factor, small_e4m3_words
from mcore_parallel.optional_kernels import OptionalKernel, wave

_KEYS = 64  # keys of one tile
_PROGRAMS = 264  # twice the multiprocessors of an H100 or H200
_MOST_SPLITS = 32
_MEMORY = "keys", "values", "tables", "lengths"
_ALL = 2**30
"""More keys than any text has: the value for "no window" and "no chunks"."""


@triton.jit
@no_type_check
def _first_seen(length, window, chunk):
    # Position of the first key that the last token of a request attends to.
    return tl.maximum(tl.maximum(0, length - 1 - window), (length - 1) // chunk * chunk)


@triton.jit
@no_type_check
def _keys_of_split(length, seen, split, KEYS: tl.constexpr, SPLITS: tl.constexpr):
    # The first key of a split, and one past its last; a split may be empty. Splits have equal
    # numbers of tiles and begin at multiples of KEYS.
    first = seen // KEYS * KEYS
    size = tl.cdiv(tl.cdiv(length - first, SPLITS), KEYS) * KEYS
    begin = first + split * size
    return begin, tl.minimum(length, begin + size)


@triton.jit
@no_type_check
def _place(table, position, Z: tl.constexpr):
    # Row of a request's token in the cache, counted over all pages.
    return tl.load(table + position // Z).to(tl.int64) * Z + position % Z


@triton.jit
@no_type_check
def _places(table, start, end, Z: tl.constexpr, KEYS: tl.constexpr):
    # Rows in the cache of KEYS consecutive tokens. If Z is a multiple of KEYS, all are in one
    # page, and one load of the table suffices.
    key = tl.arange(0, KEYS)
    if Z % KEYS == 0:
        rows = _place(table, start, Z) + key
    else:
        rows = _place(table, tl.minimum(start + key, end - 1), Z)
    return rows


@triton.jit
@no_type_check
def _copy_row(
    source, target, scale, H: tl.constexpr, LANES: tl.constexpr, IS_FP8: tl.constexpr
):
    # Copies a key or value to its page; for fp8, divides by the scale and clamps to +-448.
    lane = tl.arange(0, LANES)
    row = tl.load(source + lane, mask=lane < H)
    if IS_FP8:
        wide = tl.div_rn(row.to(tl.float32), scale)
        wide = tl.minimum(tl.maximum(wide, -448.0), 448.0)
        tl.store(
            target + lane, wide.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=lane < H
        )
    else:
        tl.store(target + lane, row, mask=lane < H)


@triton.jit
@no_type_check
def _loaded(
    memory, at, is_seen, dtype: tl.constexpr, H: tl.constexpr, LANES: tl.constexpr,
    IS_FP8: tl.constexpr,
):  # fmt: skip
    # Keys or values of the tokens in rows ``at``. fp8 codes become numbers divided by
    # ``e4m3_factor``.
    if IS_FP8:  # load four codes as one integer
        memory = memory.to(tl.pointer_type(tl.int32), bitcast=True)
    count: tl.constexpr = 4 if IS_FP8 else 1
    lane = tl.arange(0, LANES // count)
    seen = is_seen[:, None]
    if LANES > H:
        seen = seen & (lane[None, :] < H // count)
    loaded = tl.load(memory + at[:, None] * (H // count) + lane[None, :], mask=seen, other=0)
    if IS_FP8:
        loaded = small_e4m3_words(loaded, dtype, dtype == tl.bfloat16)
    return loaded


@triton.jit
@no_type_check
def _scaled(x, scale, dtype: tl.constexpr, IS_FP8: tl.constexpr):
    # Multiplies by the factor that ``_loaded`` left out, and by the scale of the codes.
    if IS_FP8:
        x = x * e4m3_factor(dtype) * scale
    return x


@triton.jit
@no_type_check
def _scores(query, key, scale, key_scale, PRECISION: tl.constexpr, IS_FP8: tl.constexpr):
    # Scores [keys, heads]; the scale of the codes is applied to them instead of to the keys.
    score = tl.dot(key, tl.trans(query), input_precision=PRECISION) * scale
    return _scaled(score, key_scale, query.dtype, IS_FP8)


@triton.jit
@no_type_check
def _nothing(
    sinks, head, is_head, split, HEADS: tl.constexpr, LANES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    # Initial running maximum, sum of weights and weighted values. A sink counts as a key
    # without a value, in the first split only.
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32)
        top = tl.where(split == 0, sink, top)
        total += tl.where(split == 0, 1.0, 0.0)
    return top, total, tl.zeros([LANES, HEADS], tl.float32)


@triton.jit
@no_type_check
def _store_part(parts, sums, at, is_head, lane, mixed, top, total, H: tl.constexpr):
    # Store the normalized values of one split, and the logarithm of its sum of weights.
    divisor = tl.where(total > 0.0, total, 1.0)  # an empty split has no weights
    places = parts + at[None, :] * H + lane[:, None]
    tl.store(places, mixed / divisor[None, :], mask=is_head[None, :] & (lane[:, None] < H))
    log_sum = tl.where(total > 0.0, top + tl.log(divisor), float("-inf"))
    tl.store(sums + at, log_sum, mask=is_head)


@triton.jit
@no_type_check
def _mix(score, value, top, total, mixed, PRECISION: tl.constexpr):
    # Online softmax: rescale the sums to the new maximum, then add the keys of this tile.
    new_top = tl.maximum(top, tl.max(score, 0))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key so far: avoids inf - inf
    weight = tl.exp(score - safe[None, :])
    shrink = tl.exp(top - safe)
    total = total * shrink + tl.sum(weight, 0)
    weight = weight.to(value.dtype)
    mixed = tl.dot(tl.trans(value), weight, mixed * shrink[None, :], input_precision=PRECISION)
    return new_top, total, mixed


@triton.jit
@no_type_check
def _attend(
    q, new_keys, new_values, keys, values, tables, lengths, sinks, out, parts, sums,
    scale, window, chunk, cap, table_size, new_key_stride, new_value_stride, key_scale,
    value_scale, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, Z: tl.constexpr,
    LANES: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, IS_FP8: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    # One program: the query heads of one group of one request, over one split of its keys. The
    # heads are few, so that keys and channels fill the taller side of the tensor cores' tiles.
    request, group, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + request)
    first_seen = _first_seen(length, window, chunk)
    begin, end = _keys_of_split(length, first_seen, split, KEYS, SPLITS)
    row, lane = tl.arange(0, HEADS), tl.arange(0, LANES)
    # Only the split that ends with the last key writes the new key and value.
    if (begin < length) & (length <= end):
        last = (_place(tables + request * table_size, length - 1, Z) * G + group) * H
        new_key = new_keys + request * new_key_stride + group * H
        new_value = new_values + request * new_value_stride + group * H
        _copy_row(new_key, keys + last, key_scale, H, LANES, IS_FP8)
        _copy_row(new_value, values + last, value_scale, H, LANES, IS_FP8)
    tl.debug_barrier()  # the loop below reads the new key and value
    head = group * (N // G) + row
    inside = (row[:, None] < N // G) & (lane[None, :] < H)
    at_query = (request * N + head[:, None]) * H + lane[None, :]
    query = tl.load(q + at_query, mask=inside, other=0.0)
    top, total, mixed = _nothing(sinks, head, row < N // G, split, HEADS, LANES, HAS_SINKS)
    for start in range(begin, end, KEYS):
        # ``place``: positions of a tile of keys; ``at``: their rows in the cache, by group.
        place = start + tl.arange(0, KEYS)
        is_key = place < end
        at = _places(tables + request * table_size, start, end, Z, KEYS) * G + group
        is_seen = is_key & (place >= first_seen)
        # Pages before the window may belong to another request and are not read.
        key = _loaded(keys, at, is_seen, query.dtype, H, LANES, IS_FP8)
        score = _scores(query, key, scale, key_scale, PRECISION, IS_FP8)
        if HAS_CAP:  # tanh(x) = 2 * sigmoid(2 x) - 1
            score = cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)
        score = tl.where(is_seen[:, None], score, float("-inf"))
        value = _loaded(values, at, is_seen, query.dtype, H, LANES, IS_FP8)
        top, total, mixed = _mix(score, value, top, total, mixed, PRECISION)
    mixed = _scaled(mixed, value_scale, query.dtype, IS_FP8)
    if SPLITS == 1:
        places = out + (request * N + head)[None, :] * H + lane[:, None]
        result = (mixed / total[None, :]).to(out.dtype.element_ty)
        tl.store(places, result, mask=(row < N // G)[None, :] & (lane[:, None] < H))
    else:
        at_part = (request * N + head) * SPLITS + split
        _store_part(parts, sums, at_part, row < N // G, lane, mixed, top, total, H)


@triton.jit
@no_type_check
def _join(parts, sums, out, H: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr):
    # One program: one head of one request. Splits are weighted by exp(log_sum).
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
    keys: Shaped[Tensor, "P Z G H"],
    values: Shaped[Tensor, "P Z G H"],
    tables: Int[Tensor, "R M"],
    lengths: Int[Tensor, " R"],
    *,
    window: int = -1,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Float[Tensor, " N"] | None = None,
    scale: float | None = None,
    kv_scales: tuple[float, float] | None = None,
) -> Float[Tensor, "R N H"]:
    """Write a new key and value of each request; attend with its one query to all its keys.

    Never waits for the device, and the launch depends on shapes alone: a CUDA graph may hold
    it.

    Args:
        q: queries; R requests.
        k: the last key of each request.
        v: the last value of each request.
        keys: cached keys in pages of Z tokens; the new keys are written to them.
        values: cached values in the same pages; the new values are written to them.
        tables: pages of each request, in order; at least the pages of the keys in its window.
        lengths: number of keys of each request, including the new key.
        window: number of earlier keys that a query attends to; -1: all.
        chunk: keys of a chunk; a query attends to keys of its own chunk only. 0: no chunks.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0: no cap.
        sinks: a logit of each head that adds to the softmax's sum.
        scale: factor on the scores; None: 1/sqrt(H).
        kv_scales: factors on keys and values in e4m3; None: the cache has the dtype of ``q``.
    """
    (R, N, H), G = q.shape, keys.shape[2]
    splits = num_splits(R * G)
    tensors = q, k, v, keys, values, tables, lengths
    arguments = launch_arguments(tensors, window, scale, kv_scales)
    lanes, out = max(16, arguments.pop("LANES")), arguments["out"]
    parts = sums = out
    if splits > 1:
        parts = torch.empty(R, N, splits, H, dtype=torch.float32, device=q.device)
        sums = torch.empty(R, N, splits, dtype=torch.float32, device=q.device)
    _attend[(R, G, splits)](
        **arguments,
        sinks=q if sinks is None else sinks,
        parts=parts,
        sums=sums,
        chunk=chunk or _ALL,
        cap=softcap,
        LANES=lanes,
        KEYS=_KEYS,
        SPLITS=splits,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        HAS_CAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        num_warps=4,  # pyrefly: ignore
    )
    if splits > 1:
        _join[(R * N,)](parts, sums, out, H, lanes, splits, num_warps=1)
    return out


def num_splits(num_programs: int) -> int:
    """Return the number of splits of the keys, a power of two.

    Enough that all programs fill the GPU about twice.
    """
    splits = max(1, min(_MOST_SPLITS, _PROGRAMS // num_programs))
    return 1 << (splits.bit_length() - 1)


def launch_arguments(
    tensors: tuple[Tensor, ...],
    window: int,
    scale: float | None,
    kv_scales: tuple[float, float] | None,
) -> dict[str, Any]:
    """Return the arguments that ``_attend`` and the kernel of ``decode_many`` share."""
    q, k, v, keys, _, tables, _ = tensors
    (_, N, H), (_, Z, G, _) = q.shape, keys.shape
    k, v = (new if new.stride()[1:] == (H, 1) else new.contiguous() for new in (k, v))
    key_scale, value_scale = kv_scales or (1.0, 1.0)
    sizes = {"N": N, "G": G, "H": H, "Z": Z}
    strides = {"new_key_stride": k.stride(0), "new_value_stride": v.stride(0)}
    return {
        "q": q.contiguous(),
        "new_keys": k,
        "new_values": v,
        **dict(zip(_MEMORY, tensors[3:], strict=True)),
        "out": torch.empty(q.shape, dtype=q.dtype, device=q.device),
        "scale": H**-0.5 if scale is None else scale,
        "window": _ALL if window < 0 else window,
        "table_size": tables.shape[1],
        **strides,
        "key_scale": key_scale,
        "value_scale": value_scale,
        **sizes,
        "LANES": triton.next_power_of_2(H),
        "HEADS": max(8, triton.next_power_of_2(N // G)),
        "IS_FP8": kv_scales is not None,
    }


def decode_trial(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    in_fp8: bool,
    rules: tuple[str, ...],
    decode: Callable[..., Tensor] = paged_decode,
) -> list[tuple[Tensor, Tensor]]:
    """Run a decoding kernel and plain torch; return pairs of outputs, keys and values."""
    from mcore_infer.engine.fp8_cache import to_codes
    from mcore_infer.engine.plain_attention import reference_decode, write_to_pages

    q = wave(3, 2 * group, head_dim, device=device, dtype=dtype)
    k, v = wave(2, 3, 2, head_dim, device=device, dtype=dtype)
    keys, values = wave(2, 9, 32, 2, head_dim, device=device, dtype=dtype)
    scales = (0.01, 0.5) if in_fp8 else None
    if in_fp8:
        keys, values = to_codes(keys, 0.01), to_codes(values, 0.5)
    tables = torch.tensor([[8, 1, 5], [2, 0, 0], [3, 7, 4]], device=device)
    lengths = torch.tensor([70, 1, 96], device=device)
    places = torch.tensor([5 * 32 + 5, 2 * 32, 4 * 32 + 31], device=device)
    sinks = wave(2 * group, device=device, dtype=torch.float32).abs()
    values_of = {"scale": 0.2, "chunk": 48, "softcap": 2.0, "sinks": sinks}
    options = {name: values_of[name] for name in rules}
    pairs = []
    for window in (-1,) if "chunk" in options else (-1, 40):
        kernel_keys, kernel_values = keys.clone(), values.clone()
        new: Any = (q, k, v, kernel_keys, kernel_values, tables, lengths)
        output = decode(*new, window=window, kv_scales=scales, **options)
        write_to_pages((keys, values), (k, v), places, scales)
        seen = (q, keys, values, tables, lengths)
        reference = reference_decode(*seen, window=window, kv_scales=scales, **options)
        pairs += [
            (output, reference),
            (kernel_keys, keys.clone()),
            (kernel_values, values.clone()),
        ]
    return pairs


DECODE_KERNEL = OptionalKernel("the paged decoding kernel", ("triton",), decode_trial)
"""Kind: dtype, channels of a head, query heads of a group, whether the cache is in fp8, and the
names of the options of ``attend`` that the model sets."""
