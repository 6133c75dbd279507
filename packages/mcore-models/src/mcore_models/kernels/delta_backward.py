"""Triton kernels of the gated delta rule's gradients; see ``kernels.delta``.

Key heads are shared by neighbouring value heads: a program computes all of them, and adds
their gradients of queries and keys where it has written those of the first.
"""

from typing import no_type_check

from mcore_models.kernels.ssd_chunks import (
    decay_gradients,
    inside_chunk,
    of_group,
    of_head,
    running_of,
    sum_of_tiles,
)
from mcore_parallel.optional_kernels import tl, triton


@triton.jit
@no_type_check
def _scores(
    q, q_token, q_row, k, k_token, k_row, token, row, group, length,
    K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    queries = of_group(q, q_token, q_row, token, row, group, length, K, K)
    keys = of_group(k, k_token, k_row, token, row, group, length, K, K)
    return tl.dot(queries, tl.trans(keys), input_precision=PRECISION)


@triton.jit(do_not_specialize=["length", "batch", "heads", "per_group"])
@no_type_check
def correction_gradients(
    q, q_token, q_row, k, k_token, k_row, g, docs, dy, dfixed,
    length, batch, heads, per_group,
    CHUNK: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
    HAS_DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's corrections by what its own tokens read of them."""
    chunk, row, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    sums, _, _, _, mine = running_of(
        g, docs, head, row, chunk, length, batch, heads, CHUNK, HAS_DOCS
    )
    weights = _scores(
        q, q_token, q_row, k, k_token, k_row, token, row, head // per_group, length,
        K, PRECISION,
    )  # fmt: skip
    weights *= inside_chunk(sums, mine, CHUNK, HAS_DOCS)
    out = of_head(dy, token, row, head, length, batch, heads, H, H)
    result = tl.dot(tl.trans(weights.to(out.dtype)), out, input_precision=PRECISION)
    at = ((token * batch + row) * heads + head)[:, None] * H + tl.arange(0, H)[None, :]
    tl.store(dfixed + at, result.to(dfixed.dtype.element_ty), mask=(token < length)[:, None])


@triton.jit(do_not_specialize=["length", "batch", "heads", "per_group"])
@no_type_check
def state_gradients(
    q, q_token, q_row, k, k_token, k_row, g, docs, erased, before, dy, dend, dfixed, dafter,
    dfirst, passed,
    length, batch, heads, per_group,
    CHUNK: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    HAS_DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk back over the chunks of a head: the gradient of the state after each.

    Adds what the state passes on to the gradients of the corrections.
    """
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    number, channel = tl.arange(0, K), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = number[:, None] * H + channel[None, :]
    own = tl.program_id(0).to(tl.int64) * (H * K)
    of_key = head // per_group * K
    chunks = tl.cdiv(length, CHUNK)
    grad = tl.load(dend + own + place).to(tl.float32)
    for passed_chunks in range(chunks):
        chunk = chunks - 1 - passed_chunks
        at = (chunk * batch * heads + tl.program_id(0)).to(tl.int64) * (H * K) + place
        narrow = grad.to(dafter.dtype.element_ty)
        tl.store(dafter + at, narrow)
        _, over, from_before, to_end, _ = running_of(
            g, docs, head, row, chunk, length, batch, heads, CHUNK, HAS_DOCS
        )
        kept = tl.sum(tl.sum(grad * tl.load(before + at).to(tl.float32), 1), 0) * over
        which = (tl.program_id(1) * chunks + chunk) * batch * heads + tl.program_id(0)
        tl.store(passed + which, kept)
        token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
        inside = token < length
        at = ((token * batch + row) * heads + head)[:, None]
        keys = of_group(k, k_token, k_row, token, row, head // per_group, length, K, K)
        where = at * H + channel[None, :]
        correction = tl.load(dfixed + where, mask=inside[:, None], other=0.0).to(tl.float32)
        correction += tl.dot(keys, narrow, input_precision=PRECISION) * to_end[:, None]
        correction = correction.to(keys.dtype)
        tl.store(dfixed + where, correction, mask=inside[:, None])
        out = tl.load(dy + where, mask=inside[:, None], other=0.0)
        out = (out * from_before[:, None]).to(keys.dtype)
        queries = tl.load(
            q + token[None, :] * q_token + row * q_row + of_key + number[:, None],
            mask=inside[None, :],
            other=0.0,
        )
        taken = tl.load(
            erased + ((token * batch + row) * heads + head)[None, :] * K + number[:, None],
            mask=inside[None, :],
            other=0.0,
        )
        grad = grad * over + tl.dot(queries, out, input_precision=PRECISION)
        grad -= tl.dot(taken, correction, input_precision=PRECISION)
    tl.store(dfirst + own + place, grad)


@triton.jit
@no_type_check
def _add(total, at, value, inside, others):
    """Add to what was written for other heads, if there were any."""
    tl.debug_barrier()  # other threads wrote it
    earlier = tl.load(total + at, mask=inside & (others > 0), other=0.0)
    tl.store(total + at, earlier + value, mask=inside)


@triton.jit(do_not_specialize=["length", "batch", "heads", "per_group", "tiles"])
@no_type_check
def output_gradients(
    q, q_token, q_row, k, k_token, k_row, g, docs, before, fixed, dafter, dy, dfixed, passed,
    dq, dk, dg, derased,
    length, batch, heads, per_group, tiles,
    CHUNK: tl.constexpr, K: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr,
    HAS_DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's queries, of keys and decays but for the system, and of erased."""
    groups = heads // per_group
    chunk, row, group = tl.program_id(0), tl.program_id(1) // groups, tl.program_id(1) % groups
    token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = token < length
    scores = _scores(
        q, q_token, q_row, k, k_token, k_row, token, row, group, length, K, PRECISION
    )
    for number_of_head in range(per_group):
        head = group * per_group + number_of_head
        sums, _, from_before, to_end, mine = running_of(
            g, docs, head, row, chunk, length, batch, heads, CHUNK, HAS_DOCS
        )
        out = of_head(dy, token, row, head, length, batch, heads, H, H)
        written = of_head(fixed, token, row, head, length, batch, heads, H, H)
        pairs = tl.dot(out, tl.trans(written), input_precision=PRECISION)
        pairs *= inside_chunk(sums, mine, CHUNK, HAS_DOCS)
        rates = tl.sum(pairs * scores, 1) - tl.sum(pairs * scores, 0)
        kept = tl.zeros([CHUNK], tl.float32)
        pairs = pairs.to(written.dtype)
        which = (chunk * batch + row) * heads + head
        for first in range(0, K, TILE):
            number = first + tl.arange(0, TILE)
            shared = ((token * batch + row) * groups + group)[:, None] * K + number[None, :]
            queries = of_group(q + first, q_token, q_row, token, row, group, length, K, TILE)
            keys = of_group(k + first, k_token, k_row, token, row, group, length, K, TILE)
            own = which.to(tl.int64) * (H * K) + tl.arange(0, H)[:, None] + number[None, :] * H
            state = tl.load(before + own)  # [H, TILE]
            read = tl.dot(out, state, input_precision=PRECISION) * from_before[:, None]
            rates += tl.sum(read * queries, 1)
            read += tl.dot(pairs, keys, input_precision=PRECISION)
            _add(dq, shared, read, inside[:, None], number_of_head)
            correction = of_head(dfixed, token, row, head, length, batch, heads, H, H)
            taken = -tl.dot(correction, state, input_precision=PRECISION)
            at = ((token * batch + row) * heads + head)[:, None] * K + number[None, :]
            tl.store(derased + at, taken.to(derased.dtype.element_ty), mask=inside[:, None])
            state = tl.load(dafter + own)
            left = tl.dot(written, state, input_precision=PRECISION) * to_end[:, None]
            kept += tl.sum(left * keys, 1)
            left += tl.dot(tl.trans(pairs), queries, input_precision=PRECISION)
            _add(dk, shared, left, inside[:, None], number_of_head)
        decay = decay_gradients(rates, kept)
        decay += sum_of_tiles(passed + which, tiles, tl.num_programs(0) * batch * heads)
        tl.store(dg + (token * batch + row) * heads + head, decay, mask=inside)


@triton.jit(do_not_specialize=["length", "batch", "heads", "per_group"])
@no_type_check
def system_gradients(
    k, k_token, k_row, v, v_token, v_row, g, beta, docs, inverse, new, erased, dfixed, derased,
    dk, dv, dg, dbeta,
    length, batch, heads, per_group,
    CHUNK: tl.constexpr, K: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr,
    HAS_DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients through a chunk's system: of values and shares; adds those of keys and decays.

    With S X = R: the gradient of R is S^-T times that of X, and S has minus R's times X^T.
    """
    groups = heads // per_group
    chunk, row, group = tl.program_id(0), tl.program_id(1) // groups, tl.program_id(1) % groups
    token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = token < length
    likeness = _scores(
        k, k_token, k_row, k, k_token, k_row, token, row, group, length, K, PRECISION
    )
    place = tl.arange(0, CHUNK)
    below = place[:, None] > place[None, :]
    for number_of_head in range(per_group):
        head = group * per_group + number_of_head
        sums, _, from_before, _, mine = running_of(
            g, docs, head, row, chunk, length, batch, heads, CHUNK, HAS_DOCS
        )
        at = (token * batch + row) * heads + head
        share = tl.load(beta + at, mask=inside, other=0.0)
        solved = tl.load(  # transposed
            inverse + at[None, :] * CHUNK + place[:, None], mask=inside[None, :], other=0.0
        )
        dshare = tl.zeros([CHUNK], tl.float32)
        pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
        for first in range(0, H, TILE):
            grad = of_head(dfixed + first, token, row, head, length, batch, heads, H, TILE)
            values = tl.dot(solved, grad, input_precision=PRECISION)
            own = of_group(v + first, v_token, v_row, token, row, head, length, H, TILE)
            dshare += tl.sum(values * own, 1)
            found = of_head(new + first, token, row, head, length, batch, heads, H, TILE)
            narrow = values.to(found.dtype)
            pairs = tl.dot(narrow, tl.trans(found), pairs, input_precision=PRECISION)
            where = at[:, None] * H + first + tl.arange(0, TILE)[None, :]
            grad = (values * share[:, None]).to(dv.dtype.element_ty)
            tl.store(dv + where, grad, mask=inside[:, None])
        of_keys = tl.zeros([CHUNK], tl.float32)
        for first in range(0, K, TILE):
            grad = of_head(derased + first, token, row, head, length, batch, heads, K, TILE)
            taken = tl.dot(solved, grad, input_precision=PRECISION)
            found = of_head(erased + first, token, row, head, length, batch, heads, K, TILE)
            narrow = taken.to(found.dtype)
            pairs = tl.dot(narrow, tl.trans(found), pairs, input_precision=PRECISION)
            keys = of_group(k + first, k_token, k_row, token, row, group, length, K, TILE)
            of_keys += tl.sum(taken * keys, 1)
        of_keys *= from_before
        pairs = tl.where(below, -pairs, 0.0) * inside_chunk(sums, mine, CHUNK, HAS_DOCS)
        dshare += of_keys + tl.sum(pairs * likeness, 1)
        tl.store(dbeta + at, dshare, mask=inside)
        pairs *= share[:, None]
        rates = tl.sum(pairs * likeness, 1) - tl.sum(pairs * likeness, 0) + of_keys * share
        decay = tl.load(dg + at, mask=inside, other=0.0) + decay_gradients(rates, rates * 0.0)
        tl.store(dg + at, decay, mask=inside)
        both = (pairs + tl.trans(pairs)).to(solved.dtype)
        for first in range(0, K, TILE):
            grad = of_head(derased + first, token, row, head, length, batch, heads, K, TILE)
            result = tl.dot(solved, grad, input_precision=PRECISION)
            result *= (share * from_before)[:, None]
            keys = of_group(k + first, k_token, k_row, token, row, group, length, K, TILE)
            result += tl.dot(both, keys, input_precision=PRECISION)
            shared = ((token * batch + row) * groups + group)[:, None] * K + first
            shared += tl.arange(0, TILE)[None, :]
            _add(dk, shared, result, inside[:, None], 1)
