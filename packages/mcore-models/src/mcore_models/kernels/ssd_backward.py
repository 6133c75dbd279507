"""Triton kernels of the state-space form's gradients; see ``kernels.ssd``.

Gradients of decay rates are differences of large sums. Both come from the same float32
matrix here, so what cancels in theory does so in fact.
"""

from typing import no_type_check

from mcore_models.kernels.ssd_chunks import (
    decay_gradients,
    decays,
    inside_chunk,
    of_group,
    sum_of_tiles,
)
from mcore_parallel.optional_kernels import tl, triton


@triton.jit(do_not_specialize=["length", "batch", "heads", "per_group"])
@no_type_check
def state_gradients(
    dy, dt, A, C, C_token, C_row, docs, before, dend, dafter, dfirst, passed,
    length, batch, heads, per_group,
    CHUNK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    HAS_DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk back over the chunks of a head: the gradient of the state after each."""
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    group = head // per_group
    channel = tl.arange(0, H)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = channel[:, None] * K + number[None, :]
    own = tl.program_id(0).to(tl.int64) * (H * K)
    chunks = tl.cdiv(length, CHUNK)
    grad = tl.load(dend + own + place).to(tl.float32)
    for passed_chunks in range(chunks):
        chunk = chunks - 1 - passed_chunks
        at = (chunk * batch * heads + tl.program_id(0)).to(tl.int64) * (H * K) + place
        tl.store(dafter + at, grad.to(dafter.dtype.element_ty))
        _, _, over, from_before, _, _ = decays(
            dt, A, docs, head, row, chunk, length, batch, heads, CHUNK, HAS_DOCS
        )
        kept = tl.sum(tl.sum(grad * tl.load(before + at).to(tl.float32), 1), 0) * over
        which = (tl.program_id(1) * chunks + chunk) * batch * heads + tl.program_id(0)
        tl.store(passed + which, kept)
        token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
        inside = token < length
        out = tl.load(
            dy + (token[None, :] * batch + row) * heads * H + head * H + channel[:, None],
            mask=inside[None, :],
            other=0.0,
        )
        read = tl.load(
            C + token[:, None] * C_token + row * C_row + group * K + number[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        out = (out * from_before[None, :]).to(read.dtype)
        grad = grad * over + tl.dot(out, read, input_precision=PRECISION)
    tl.store(dfirst + own + place, grad)


@triton.jit
@no_type_check
def _of_head(
    x, x_token, x_row, dy, dt, A, docs, head, row, chunk, length, batch, heads,
    CHUNK: tl.constexpr, H: tl.constexpr, HAS_DOCS: tl.constexpr,
):  # fmt: skip
    """Load a head's gradient of outputs and x dt of a chunk, and compute its decays."""
    step, sums, _, from_before, to_end, mine = decays(
        dt, A, docs, head, row, chunk, length, batch, heads, CHUNK, HAS_DOCS
    )
    decay = inside_chunk(sums, mine, CHUNK, HAS_DOCS)
    token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)[:, None]
    at = row * x_row + head * H + tl.arange(0, H)[None, :]
    entering = tl.load(x + token * x_token + at, mask=token < length, other=0.0)
    at = (token * batch + row) * heads * H + head * H + tl.arange(0, H)[None, :]
    out = tl.load(dy + at, mask=token < length, other=0.0)
    return out, entering.to(tl.float32), step, decay, from_before, to_end


@triton.jit(do_not_specialize=["length", "batch", "heads", "groups", "heads_here", "tiles"])
@no_type_check
def input_gradients(
    x, x_token, x_row, dt, A, B, B_token, B_row, C, C_token, C_row, D, docs, before, dafter,
    passed, dy, dx, ddt, dA, dD,
    length, batch, heads, groups, heads_here, tiles,
    CHUNK: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    HAS_DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a chunk's gradients of x and dt, and its part of A's and D's; some heads."""
    chunk, row, group = tl.program_id(0), tl.program_id(1) // groups, tl.program_id(1) % groups
    token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = token < length
    written = of_group(B, B_token, B_row, token, row, group, length, K, K)
    read = of_group(C, C_token, C_row, token, row, group, length, K, K)
    scores = tl.dot(read, tl.trans(written), input_precision=PRECISION)
    first_head = group * (heads // groups) + tl.program_id(2) * heads_here
    for number_of_head in range(heads_here):
        head = first_head + number_of_head
        out, entering, step, decay, from_before, to_end = _of_head(
            x, x_token, x_row, dy, dt, A, docs, head, row, chunk, length, batch, heads,
            CHUNK, H, HAS_DOCS,
        )  # fmt: skip
        scaled = entering * step[:, None]
        # Inside the chunk: rows read, columns were written.
        weights = scores * decay
        pairs = tl.dot(out, tl.trans(scaled.to(out.dtype)), input_precision=PRECISION) * weights
        rates = tl.sum(pairs, 1) - tl.sum(pairs, 0)
        grad_scaled = tl.dot(tl.trans(weights.to(out.dtype)), out, input_precision=PRECISION)

        # The state before, which the chunk reads, and the one after, to which it adds.
        which = (chunk * batch + row) * heads + head
        own = which.to(tl.int64) * (H * K)
        own += tl.arange(0, H)[:, None] * K + tl.arange(0, K)[None, :]
        wide = out.to(tl.float32)
        state = tl.trans(tl.load(before + own))
        rates += tl.sum(wide * tl.dot(read, state, input_precision=PRECISION), 1) * from_before
        state = tl.trans(tl.load(dafter + own))
        grad_after = tl.dot(written, state, input_precision=PRECISION) * to_end[:, None]
        kept = tl.sum(grad_after * scaled, 1)
        grad_scaled += grad_after

        grad_decay = decay_gradients(rates, kept)
        grad_decay += sum_of_tiles(passed + which, tiles, tl.num_programs(0) * batch * heads)
        grad_step = grad_decay * tl.load(A + head) + tl.sum(grad_scaled * entering, 1)
        tl.store(ddt + (token * batch + row) * heads + head, grad_step, mask=inside)
        tl.store(dA + which, tl.sum(grad_decay * step, 0))
        tl.store(dD + which, tl.sum(tl.sum(entering * wide, 1), 0))
        grad_scaled = grad_scaled * step[:, None] + wide * tl.load(D + head).to(tl.float32)
        at = (token[:, None] * batch + row) * heads * H + head * H + tl.arange(0, H)[None, :]
        tl.store(dx + at, grad_scaled.to(dx.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["length", "batch", "heads", "groups", "heads_here"])
@no_type_check
def group_gradients(
    x, x_token, x_row, dt, A, B, B_token, B_row, C, C_token, C_row, docs, before, dafter,
    dy, dB, dC,
    length, batch, heads, groups, heads_here,
    CHUNK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    HAS_DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk's B and C, some of their numbers, summed over some heads."""
    chunk, row, group = tl.program_id(0), tl.program_id(1) // groups, tl.program_id(1) % groups
    tiles = K // BLOCK
    tile, part = tl.program_id(2) % tiles, tl.program_id(2) // tiles
    token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = (token < length)[:, None]
    number = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = token[:, None] * B_token + row * B_row + group * K + number
    written = tl.load(B + at, mask=inside, other=0.0)
    at = token[:, None] * C_token + row * C_row + group * K + number
    read = tl.load(C + at, mask=inside, other=0.0)
    grad_written = tl.zeros([CHUNK, BLOCK], tl.float32)
    grad_read = tl.zeros([CHUNK, BLOCK], tl.float32)
    for number_of_head in range(heads_here):
        head = group * (heads // groups) + part * heads_here + number_of_head
        out, entering, step, decay, from_before, to_end = _of_head(
            x, x_token, x_row, dy, dt, A, docs, head, row, chunk, length, batch, heads,
            CHUNK, H, HAS_DOCS,
        )  # fmt: skip
        scaled = entering * step[:, None]
        pairs = tl.dot(out, tl.trans(scaled.to(out.dtype)), input_precision=PRECISION) * decay
        pairs = pairs.to(read.dtype)
        grad_read = tl.dot(pairs, written, grad_read, input_precision=PRECISION)
        grad_written = tl.dot(tl.trans(pairs), read, grad_written, input_precision=PRECISION)
        own = ((chunk * batch + row) * heads + head).to(tl.int64) * (H * K)
        own += tl.arange(0, H)[:, None] * K + number
        out = (out.to(tl.float32) * from_before[:, None]).to(read.dtype)
        state = tl.load(before + own)
        grad_read = tl.dot(out, state, grad_read, input_precision=PRECISION)
        scaled = (scaled * to_end[:, None]).to(read.dtype)
        state = tl.load(dafter + own)
        grad_written = tl.dot(scaled, state, grad_written, input_precision=PRECISION)
    at = ((part * length + token[:, None]) * batch + row) * groups + group
    tl.store(dB + at * K + number, grad_written, mask=inside)
    tl.store(dC + at * K + number, grad_read, mask=inside)
