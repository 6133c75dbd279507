"""Triton kernels of the state-space form's gradients; see ``kernels.ssd``.

Gradients of decay rates are differences of large sums. Both come from the same float32
matrix here, so what cancels in theory does so in fact.
"""

from typing import no_type_check

import triton
import triton.language as tl

from mcore_models.kernels.ssd_chunks import decays, inside_chunk, of_group


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
def _decay_gradients(rates, kept):
    """Sum what goes from before each token to it or later; its decay acts on that.

    ``rates``: of a token, what it reads less what later ones read of it; ``kept``: what it
    leaves to the state after the chunk.
    """
    return tl.sum(rates, 0) - tl.cumsum(rates, 0) + rates + tl.cumsum(kept, 0) - kept


@triton.jit
@no_type_check
def _of_tiles(first, tiles, stride):
    """Sum the parts of a number that programs of several tiles left."""
    result = tl.load(first)
    for tile in range(1, tiles):
        result += tl.load(first + tile * stride)
    return result


@triton.jit
@no_type_check
def _inside(out, scaled, scores, decay, read, written, PRECISION: tl.constexpr):
    """Gradients by what one head's tokens read of their own chunk: of C, B, x dt and decays."""
    # Rows read, columns were written.
    pairs = tl.dot(out, tl.trans(scaled.to(read.dtype)), input_precision=PRECISION) * decay
    rates = tl.sum(pairs * scores, 1) - tl.sum(pairs * scores, 0)
    pairs = pairs.to(read.dtype)
    grad_read = tl.dot(pairs, written, input_precision=PRECISION)
    grad_written = tl.dot(tl.trans(pairs), read, input_precision=PRECISION)
    weights = tl.trans((scores * decay).to(read.dtype))
    grad_scaled = tl.dot(weights, out, input_precision=PRECISION)
    return grad_read, grad_written, grad_scaled, rates


@triton.jit
@no_type_check
def _through_states(
    out, scaled, state, grad_state, read, written, PRECISION: tl.constexpr
):  # fmt: skip
    """Gradients by what one head reads of the state before, and adds to the one after."""
    grad_read = tl.dot(out.to(read.dtype), state, input_precision=PRECISION)
    grad_written = tl.dot(scaled.to(read.dtype), grad_state, input_precision=PRECISION)
    grad_scaled = tl.dot(written, tl.trans(grad_state), input_precision=PRECISION)
    rates = tl.sum(grad_read * read.to(tl.float32), 1)
    kept = tl.sum(grad_written * written.to(tl.float32), 1)
    return grad_read, grad_written, grad_scaled, rates, kept


@triton.jit(do_not_specialize=["length", "batch", "heads", "groups", "heads_here", "tiles"])
@no_type_check
def input_gradients(
    x, x_token, x_row, dt, A, B, B_token, B_row, C, C_token, C_row, D, docs, before, dafter,
    passed, dy, dx, ddt, dA, dB, dC, dD,
    length, batch, heads, groups, heads_here, tiles,
    CHUNK: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    HAS_DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk's inputs, some heads; those of B and C summed over these."""
    chunk, row, group = tl.program_id(0), tl.program_id(1) // groups, tl.program_id(1) % groups
    token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = token < length
    channel, number = tl.arange(0, H), tl.arange(0, K)
    written = of_group(B, B_token, B_row, token, row, group, length, K)
    read = of_group(C, C_token, C_row, token, row, group, length, K)
    scores = tl.dot(read, tl.trans(written), input_precision=PRECISION)
    grad_written = tl.zeros([CHUNK, K], tl.float32)
    grad_read = tl.zeros([CHUNK, K], tl.float32)
    first_head = group * (heads // groups) + tl.program_id(2) * heads_here
    for number_of_head in range(heads_here):
        head = first_head + number_of_head
        step, sums, _, from_before, to_end, mine = decays(
            dt, A, docs, head, row, chunk, length, batch, heads, CHUNK, HAS_DOCS
        )
        decay = inside_chunk(sums, mine, CHUNK, HAS_DOCS)
        at = row * x_row + head * H + channel[None, :]
        entering = tl.load(x + token[:, None] * x_token + at, mask=inside[:, None], other=0.0)
        at = (token[:, None] * batch + row) * heads * H + head * H + channel[None, :]
        out = tl.load(dy + at, mask=inside[:, None], other=0.0)
        which = (chunk * batch + row) * heads + head
        own = which.to(tl.int64) * (H * K) + channel[:, None] * K + number[None, :]
        entering_wide = entering.to(tl.float32)
        out_wide, scaled = out.to(tl.float32), entering_wide * step[:, None]

        read_here, written_here, grad_scaled, rates = _inside(
            out, scaled, scores, decay, read, written, PRECISION
        )
        read_before, written_after, grad_after, from_state, kept = _through_states(
            out_wide * from_before[:, None], scaled * to_end[:, None],
            tl.load(before + own), tl.load(dafter + own), read, written, PRECISION,
        )  # fmt: skip
        grad_read += read_here + read_before
        grad_written += written_here + written_after
        grad_scaled += grad_after * to_end[:, None]
        rates += from_state
        grad_decay = _decay_gradients(rates, kept)
        grad_decay += _of_tiles(passed + which, tiles, tl.num_programs(0) * batch * heads)
        grad_step = grad_decay * tl.load(A + head) + tl.sum(grad_scaled * entering_wide, 1)
        tl.store(ddt + (token * batch + row) * heads + head, grad_step, mask=inside)
        tl.store(dA + which, tl.sum(grad_decay * step, 0))
        tl.store(dD + which, tl.sum(tl.sum(entering_wide * out_wide, 1), 0))
        grad_scaled = grad_scaled * step[:, None] + out_wide * tl.load(D + head).to(tl.float32)
        tl.store(dx + at, grad_scaled.to(dx.dtype.element_ty), mask=inside[:, None])
    at = ((tl.program_id(2) * length + token[:, None]) * batch + row) * groups + group
    at = at * K + number[None, :]
    tl.store(dB + at, grad_written, mask=inside[:, None])
    tl.store(dC + at, grad_read, mask=inside[:, None])
