"""Gluon kernel of paged decoding for many requests: one warp reads all keys of a head group.

With hundreds of programs the keys need no splits, and speed is limited by the bytes in flight
and by the instructions for each byte. The kernel is therefore written in Gluon, Triton's
language of explicit layouts: asynchronous copies load tiles of keys and values ahead of their
use, and one warp moves the tiles from shared memory to tensor core operands without a barrier
between warps. fp8 codes are loaded in pairs; the two bytes become two bfloat16 operands in
registers. Imported by the trial of ``DECODE_MANY_KERNEL``, because some builds of Triton have
no Gluon.
"""

from typing import no_type_check

import triton.experimental.gluon.language as gl
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from mcore_infer.engine.kernels.dequantization import E4M3_FACTOR
from mcore_infer.engine.kernels.paged_attention import launch_arguments

_LOG2E = gl.constexpr(1.4426950408889634)
_FACTOR = gl.constexpr(E4M3_FACTOR.value)
# Names that differ between Triton 3.6 and 3.9.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# e4m3 -> bfloat16 for the lower bytes and for the upper bytes of two 16-bit lanes. The shift
# aligns exponent and fraction, lop3 adds the sign, as in ``dequantization``.
_LOW = gl.constexpr("""{
.reg .b32 a, b;
shl.b32 a, $1, 8;
shl.b32 b, $1, 4;
and.b32 b, b, 0x07f007f0;
lop3.b32 $0, a, 0x80008000, b, 0xea;
}""")
_HIGH = gl.constexpr("""{
.reg .b32 b;
shr.u32 b, $1, 4;
and.b32 b, b, 0x07f007f0;
lop3.b32 $0, $1, 0x80008000, b, 0xea;
}""")


@gluon.jit
@no_type_check
def _halves(pair):
    # The numbers of the low bytes and of the high bytes, divided by E4M3_FACTOR.
    low = gl.inline_asm_elementwise(
        _LOW, "=r,r", [pair], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    high = gl.inline_asm_elementwise(
        _HIGH, "=r,r", [pair], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    return low, high


@gluon.constexpr_function
def _shared(C):
    # Shared memory of rows of C 16-bit numbers, swizzled against bank conflicts.
    phase = 8 // min(C // 8, 8)
    return gl.SwizzledSharedLayout(8, phase, 8 // phase, order=[1, 0])


@gluon.constexpr_function
def _copied(C):
    # Layout of a copy: each thread copies 16 bytes.
    threads = min(C // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [1, 1], [1, 0])


@gluon.jit
@no_type_check
def _write_row(source, target, scale, H: gl.constexpr, LANES: gl.constexpr, IS_FP8):
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    lane = gl.arange(0, LANES, flat)
    row = gl.load(source + lane, mask=lane < H)
    if IS_FP8:
        wide = gl.div_rn(row.to(gl.float32), gl.full([LANES], scale, gl.float32, flat))
        wide = gl.minimum(gl.maximum(wide, -448.0), 448.0)
        code = wide.to(gl.float8e4nv).to(gl.uint8, bitcast=True)
        gl.store(target + lane, code, mask=lane < H)
    else:
        gl.store(target + lane, row, mask=lane < H)


@gluon.jit
@no_type_check
def _copy_tile(
    keys, values, held_keys, held_values, stage, page, start, length, group,
    G: gl.constexpr, Z: gl.constexpr, HELD: gl.constexpr, C: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    # Starts the copy of one tile of keys and values to shared memory. Rows after the end become
    # 0, because the memory there may have NaN of another request. HELD: 16-bit numbers of a
    # cached row; C: HELD, rounded up to a power of two.
    row = gl.arange(0, KEYS, gl.SliceLayout(1, _copied(C)))
    column = gl.arange(0, C, gl.SliceLayout(0, _copied(C)))
    at = group * HELD + row[:, None] * (G * HELD) + column[None, :]
    base = (page * Z + start % Z) * (G * HELD)
    is_own = (start + row < length)[:, None]
    if C > HELD:
        is_own = is_own & (column < HELD)[None, :]
    key, value = held_keys.index(stage), held_values.index(stage)
    _async_load(key, keys + base + at, mask=is_own)
    _async_load(value, values + base + at, mask=is_own)
    async_copy.commit_group()


@gluon.jit
@no_type_check
def _queries(
    q, num_heads, C: gl.constexpr, HELD: gl.constexpr, H: gl.constexpr, HEADS: gl.constexpr,
    STEP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    # Queries as [channels, heads]; for fp8, even and odd channels as two tensors, because the
    # two bytes of a pair become separate operands.
    flat: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 1], [0, 1])
    channel = gl.arange(0, C, gl.SliceLayout(1, flat))
    head = gl.arange(0, HEADS, gl.SliceLayout(0, flat))
    inside = (head < num_heads)[None, :] & (channel < HELD)[:, None]
    at = q + head[None, :] * H + STEP * channel[:, None]
    even = gl.convert_layout(gl.load(at, mask=inside, other=0.0), layout)
    odd = even
    if STEP == 2:
        odd = gl.convert_layout(gl.load(at + 1, mask=inside, other=0.0), layout)
    return even, odd


@gluon.jit
@no_type_check
def _tile(
    key, value, queries, is_seen, scale, top, weights, mixed, odd_mixed,
    narrow: gl.constexpr, IS_FP8: gl.constexpr,
):  # fmt: skip
    # Online softmax in base 2 over one tile of keys: updates the maximum, the weights and the
    # weighted values (for fp8, of even and of odd channels).
    query, odd_query = queries
    nothing = gl.zeros_like(weights)
    if IS_FP8:
        key, odd_key = _halves(key)
        score = mma_v2(odd_key, odd_query, mma_v2(key, query, nothing))
    else:
        score = mma_v2(key, query, nothing)
    score = gl.where(is_seen[:, None], score * (scale * _LOG2E), float("-inf"))
    new_top = gl.maximum(top, gl.max(score, 0))
    weight = gl.exp2(score - new_top[None, :])
    shrink = gl.exp2(top - new_top)[None, :]
    weights = weights * shrink + weight
    weight = gl.convert_layout(weight.to(query.dtype), narrow)
    if IS_FP8:
        value, odd_value = _halves(value)
        odd_mixed = mma_v2(odd_value, weight, odd_mixed * shrink)
    return new_top, weights, mma_v2(value, weight, mixed * shrink), odd_mixed


@gluon.jit
@no_type_check
def _attend_many(
    q, new_keys, new_values, keys, values, tables, lengths, out, scale, window, table_size,
    new_key_stride, new_value_stride, key_scale, value_scale,
    N: gl.constexpr, G: gl.constexpr, H: gl.constexpr, Z: gl.constexpr, LANES: gl.constexpr,
    HEADS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, IS_FP8: gl.constexpr,
):  # fmt: skip
    # One program of one warp: the heads of one group of one request. Groups of one request are
    # adjacent in memory and in the grid.
    group, request = gl.program_id(0), gl.program_id(1).to(gl.int64)
    last = gl.load(lengths + request).to(gl.int32) - 1
    table = tables + request * table_size
    place = ((gl.load(table + last // Z) * Z + last % Z) * G + group) * H
    new_keys += request * new_key_stride + group * H
    new_values += request * new_value_stride + group * H
    _write_row(new_keys, keys + place, key_scale, H, LANES, IS_FP8)
    _write_row(new_values, values + place, value_scale, H, LANES, IS_FP8)
    _barrier()  # the copies below read the new key and value
    first_head = request * N + group * (N // G)
    mixed, odd_mixed, total = _attended(
        q + first_head * H, keys, values, table, last, group, scale, window, key_scale,
        N // G, G, H, Z, LANES, HEADS, KEYS, STAGES, IS_FP8,
    )  # fmt: skip
    norm = 1.0 / total
    STEP: gl.constexpr = 2 if IS_FP8 else 1
    if IS_FP8:
        norm = norm * (_FACTOR * value_scale)
    channel = STEP * gl.arange(0, mixed.shape[0], gl.SliceLayout(1, mixed.type.layout))
    head = gl.arange(0, HEADS, gl.SliceLayout(0, mixed.type.layout))
    inside = (head < N // G)[None, :] & (channel < H)[:, None]
    out += first_head * H + head[None, :] * H + channel[:, None]
    gl.store(out, (mixed * norm[None, :]).to(q.dtype.element_ty), mask=inside)
    if IS_FP8:
        gl.store(out + 1, (odd_mixed * norm[None, :]).to(q.dtype.element_ty), mask=inside)


@gluon.jit
@no_type_check
def _attended(
    q, keys, values, table, last, group, scale, window, key_scale,
    NUM: gl.constexpr, G: gl.constexpr, H: gl.constexpr, Z: gl.constexpr, LANES: gl.constexpr,
    HEADS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, IS_FP8: gl.constexpr,
):  # fmt: skip
    # Returns weighted values [channels, heads] (for fp8, of even and of odd channels) and the
    # sums of weights. Lanes are 16 bits wide.
    STEP: gl.constexpr = 2 if IS_FP8 else 1
    HELD: gl.constexpr = H // STEP
    C: gl.constexpr = LANES // STEP
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    tall: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    narrow: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    if IS_FP8:
        keys = keys.to(gl.pointer_type(gl.int16), bitcast=True)
        values = values.to(gl.pointer_type(gl.int16), bitcast=True)
        scale = scale * _FACTOR * key_scale
    held: gl.constexpr = keys.dtype.element_ty
    held_keys = gl.allocate_shared_memory(held, [STAGES, KEYS, C], _shared(C))
    held_values = gl.allocate_shared_memory(held, [STAGES, KEYS, C], _shared(C))
    seen = gl.maximum(0, last - window)
    begin = seen // KEYS * KEYS
    # Start the copies of the first STAGES - 1 tiles; the loop always has one free stage.
    for i in gl.static_range(STAGES - 1):
        ahead = begin + i * KEYS
        page = gl.load(table + gl.minimum(ahead, last) // Z)
        to = (keys, values, held_keys, held_values)
        _copy_tile(*to, i, page, ahead, last + 1, group, G, Z, HELD, C, KEYS)
    queries = _queries(q, NUM, C, HELD, H, HEADS, STEP, narrow)
    weights = gl.full([KEYS, HEADS], 0.0, gl.float32, mma)  # summed over keys at the end
    mixed = gl.full([C, HEADS], 0.0, gl.float32, mma)
    odd_mixed = mixed
    top = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(0, mma))
    page = gl.load(table + gl.minimum(begin + (STAGES - 1) * KEYS, last) // Z)
    for i in range(gl.cdiv(last + 1 - begin, KEYS)):
        # Wait for this tile, then start the copy that overwrites the previous tile.
        async_copy.wait_group(STAGES - 2)
        _barrier()
        stage, ahead = (i + STAGES - 1) % STAGES, begin + (i + STAGES - 1) * KEYS
        next_page = gl.load(table + gl.minimum(ahead + KEYS, last) // Z)
        to = (keys, values, held_keys, held_values)
        _copy_tile(*to, stage, page, ahead, last + 1, group, G, Z, HELD, C, KEYS)
        page = next_page
        key = held_keys.index(i % STAGES).load(tall)
        value = held_values.index(i % STAGES).permute([1, 0]).load(tall)
        spot = begin + i * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, mma))
        is_seen = (spot <= last) & (spot >= seen)
        top, weights, mixed, odd_mixed = _tile(
            key, value, queries, is_seen, scale, top, weights, mixed, odd_mixed, narrow, IS_FP8,
        )  # fmt: skip
    async_copy.wait_group(0)
    return mixed, odd_mixed, gl.sum(weights, 0)


def decode_many(
    q: Float[Tensor, "R N H"],
    k: Float[Tensor, "R G H"],
    v: Float[Tensor, "R G H"],
    keys: Shaped[Tensor, "P Z G H"],
    values: Shaped[Tensor, "P Z G H"],
    tables: Int[Tensor, "R M"],
    lengths: Int[Tensor, " R"],
    *,
    window: int = -1,
    scale: float | None = None,
    kv_scales: tuple[float, float] | None = None,
) -> Float[Tensor, "R N H"]:
    """Compute ``paged_attention.paged_decode`` in bfloat16, for sizes of ``takes_many``."""
    R, G, is_fp8 = q.shape[0], keys.shape[2], kv_scales is not None
    tensors = q, k, v, keys, values, tables, lengths
    arguments = launch_arguments(tensors, window, scale, kv_scales)
    _attend_many[(G, R)](  # pyrefly: ignore
        **arguments,
        KEYS=16 if is_fp8 else 32,
        STAGES=3 if is_fp8 else 2,
        num_warps=1,  # pyrefly: ignore
    )
    return arguments["out"]
