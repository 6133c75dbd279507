"""The gated delta rule: a decaying state, corrected at each token's key, computed by chunks.

Every head has a state M of K x H numbers. At each token the state decays, a share of the value
stored under the token's key is replaced by the token's value, and the query reads the state:

    M_t = e^{g_t} M_{t-1}
    M_t = M_t + k_t (beta_t (v_t - M_t^T k_t))^T        o_t = M_t^T q_t

Inside a chunk of Q tokens each correction depends on the earlier ones, through a lower
triangular system of Q equations: with A_ij = beta_i (k_i . k_j) e^{G_i - G_j} for j < i and G
the running sum of g, the corrections are (I + A)^{-1} (beta V - beta e^G K M). So most of the
work is GEMMs, only the states at the chunks' ends are sequential, and the result does not
depend on Q except for rounding. A step of generation is the same computation with one token.

In the Triton kernels, with S = I + A, the products S^{-1} (beta V) and S^{-1} (beta e^G K) are
computed chunk by chunk; then one kernel loops over the chunks of a head, keeps a part of the
state in registers and writes the state before each chunk and its corrections; finally the
outputs of each chunk are computed. Only the inputs and S^{-1} are saved for backward.

With a decay for each channel of the keys (Kimi Delta Attention), g_t is a vector of K numbers,
and A_ij = beta_i sum_c k_ic k_jc e^{G_ic - G_jc}. As e^{-G} alone may overflow, this sum cannot
be computed as a GEMM of k e^{G} and k e^{-G}. Plain torch computes this form.

N heads with values of H channels, G key heads (each the query and key of N / G neighbouring
heads) of K channels.

Reference:
    Yang et al. 2024, Gated Delta Networks, arXiv:2412.06464, section 3; the triangular form,
    Yang et al. 2024, arXiv:2406.06484, section 3; decay by channel, Kimi team 2025, Kimi
    Linear, arXiv:2510.26692, section 3.
"""

from collections.abc import Callable, Iterator
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mcore_models.kernels.delta_backward import (
    correction_gradients,
    output_gradients,
    state_gradients,
    system_gradients,
)
from mcore_models.kernels.ssd import NARROW
from mcore_models.kernels.ssd_chunks import inside_chunk, of_group, of_head, running_of
from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave

CHUNK = 64
"""Tokens of a chunk, Q; memory grows with S x Q, the sequential steps with S / Q."""
RAN_ON_GPU = ((128, 128),)
"""Channels of keys and values for which the kernels were correct on an H200, least first: 16 x
16 gave NaN and 64 x 32 errors of 1, so others are not used. Narrower keys and values are padded
with zeros; wider values are split into several heads, which are independent."""
_SYSTEM = {"num_warps": 4, "num_stages": 1}
_STATES = {"num_warps": 4, "num_stages": 3}
_OUTPUTS = {"num_warps": 4, "num_stages": 1}
_GRADIENTS = {"num_warps": 4, "num_stages": 1}
"""Compilation options of the kernels."""
_BLOCK, _TILE = 32, 64
"""Value channels of a program's part of the state; channels of a GEMM in backward."""


@triton.jit
@no_type_check
def _inverse(system, CHUNK: tl.constexpr):
    """Invert I + ``system``, strictly lower triangular: blocks of 16 by rows, then by blocks.

    As accurate as substitution: powers of the system, which may be huge, are not formed.
    """
    COUNT: tl.constexpr = CHUNK // 16
    number, place = tl.arange(0, COUNT), tl.arange(0, 16)
    blocks = tl.reshape(system, [COUNT, 16, COUNT, 16])
    own = number[:, None, None, None] == number[None, None, :, None]
    inner = tl.sum(tl.where(own, blocks, 0.0), 2)  # [COUNT, 16, 16], the diagonal blocks
    inverse = tl.where((place[:, None] == place[None, :])[None, :, :], 1.0, inner * 0.0)
    # Forward substitution in all diagonal blocks at once: row i of the inverse is e_i minus
    # the sum over j < i of inner[i, j] times row j.
    for row in range(1, 16):
        is_row = (place == row)[None, :, None]
        factors = tl.sum(tl.where(is_row, inner, 0.0), 1)
        known = tl.sum(factors[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, inverse - known[:, None, :], inverse)
    inverse = tl.reshape(tl.where(own, inverse[:, :, None, :], 0.0), [CHUNK, CHUNK])
    if COUNT == 1:
        return inverse
    block = tl.arange(0, CHUNK) // 16
    # D: the diagonal blocks, O: the rest. (D + O)^-1 = D^-1 - D^-1 O (D + O)^-1.
    outer = tl.where(block[:, None] == block[None, :], 0.0, system)
    step = tl.dot(inverse, outer, input_precision="tf32x3")
    result = inverse
    for _ in tl.static_range(COUNT - 1):  # each iteration completes one more row of blocks
        result = inverse - tl.dot(step, result, input_precision="tf32x3")
    return result


@triton.jit(do_not_specialize=["length", "batch", "heads", "per_group"])
@no_type_check
def _corrections(
    k, k_token, k_row, v, v_token, v_row, g, beta, docs, inverse, new, erased,
    length, batch, heads, per_group,
    CHUNK: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
    HAS_DOCS: tl.constexpr, IS_SOLVED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Solve a chunk's system for its values, and for the part of the state that keys erase."""
    chunk, row, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = token < length
    sums, _, from_before, _, mine = running_of(
        g, docs, head, row, chunk, length, batch, heads, CHUNK, HAS_DOCS
    )
    at = (token * batch + row) * heads + head
    share = tl.load(beta + at, mask=inside, other=0.0)
    keys = of_group(k, k_token, k_row, token, row, head // per_group, length, K, K)
    place = tl.arange(0, CHUNK)
    # S = I + A with A_ij = beta_i (k_i . k_j) e^{G_i - G_j} for j < i.
    if IS_SOLVED:
        solved = tl.load(
            inverse + at[:, None] * CHUNK + place[None, :], mask=inside[:, None], other=0.0
        )
    else:
        system = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * share[:, None]
        system *= inside_chunk(sums, mine, CHUNK, HAS_DOCS)
        system = tl.where(place[:, None] > place[None, :], system, 0.0)
        solved = _inverse(system, CHUNK).to(inverse.dtype.element_ty)
        tl.store(inverse + at[:, None] * CHUNK + place[None, :], solved, mask=inside[:, None])
    values = of_group(v, v_token, v_row, token, row, head, length, H, H)
    # new = S^-1 (beta V)
    values = (values * share[:, None]).to(solved.dtype)
    result = tl.dot(solved, values, input_precision=PRECISION)
    where = at[:, None] * H + tl.arange(0, H)[None, :]
    tl.store(new + where, result.to(new.dtype.element_ty), mask=inside[:, None])
    # erased = S^-1 (beta e^G K); e^G is 0 for tokens of documents that begin in this chunk.
    keys = (keys * (share * from_before)[:, None]).to(solved.dtype)
    result = tl.dot(solved, keys, input_precision=PRECISION)
    where = at[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(erased + where, result.to(erased.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["length", "batch", "heads", "per_group"])
@no_type_check
def _states(
    k, k_token, k_row, new, erased, g, docs, first, before, fixed, end,
    length, batch, heads, per_group,
    CHUNK: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    HAS_DOCS: tl.constexpr, HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Loop over the chunks of a head: store the states, and each chunk's corrections."""
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    number, channel = tl.arange(0, K), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = number[:, None] * H + channel[None, :]
    own = tl.program_id(0).to(tl.int64) * (H * K)
    state = tl.zeros([K, BLOCK], tl.float32)
    if HAS_FIRST:
        state += tl.load(first + own + place).to(tl.float32)
    for chunk in range(tl.cdiv(length, CHUNK)):
        at = (chunk * batch * heads + tl.program_id(0)).to(tl.int64) * (H * K) + place
        tl.store(before + at, state.to(before.dtype.element_ty))
        _, over, _, to_end, _ = running_of(
            g, docs, head, row, chunk, length, batch, heads, CHUNK, HAS_DOCS
        )
        token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
        inside = token < length
        at = ((token * batch + row) * heads + head)[:, None]
        # Corrections of the tokens: fixed = new - erased M.
        taken = tl.load(erased + at * K + number[None, :], mask=inside[:, None], other=0.0)
        correction = tl.load(new + at * H + channel[None, :], mask=inside[:, None], other=0.0)
        correction = correction.to(tl.float32)
        correction -= tl.dot(taken, state.to(taken.dtype), input_precision=PRECISION)
        narrow = correction.to(fixed.dtype.element_ty)
        tl.store(fixed + at * H + channel[None, :], narrow, mask=inside[:, None])
        keys = tl.load(
            k
            + token[None, :] * k_token
            + row * k_row
            + head // per_group * K
            + number[:, None],
            mask=inside[None, :],
            other=0.0,
        )
        # M <- e^{G_Q} M + K^T (e^{G_Q - G} fixed); keys were loaded as [K, Q].
        correction = (correction * to_end[:, None]).to(keys.dtype)
        state = state * over + tl.dot(keys, correction, input_precision=PRECISION)
    tl.store(end + own + place, state)


@triton.jit(do_not_specialize=["length", "batch", "heads", "per_group"])
@no_type_check
def _outputs(
    q, q_token, q_row, k, k_token, k_row, g, docs, before, fixed, y,
    length, batch, heads, per_group,
    CHUNK: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
    HAS_DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a chunk's outputs from its tokens' corrections and the state before them."""
    chunk, row, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    group = head // per_group
    sums, _, from_before, _, mine = running_of(
        g, docs, head, row, chunk, length, batch, heads, CHUNK, HAS_DOCS
    )
    queries = of_group(q, q_token, q_row, token, row, group, length, K, K)
    keys = of_group(k, k_token, k_row, token, row, group, length, K, K)
    # o = e^G q M + W fixed with W_ij = (q_i . k_j) e^{G_i - G_j} for j <= i.
    weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    weights *= inside_chunk(sums, mine, CHUNK, HAS_DOCS)
    own = ((chunk * batch + row) * heads + head).to(tl.int64) * (H * K)
    place = tl.arange(0, K)[:, None] * H + tl.arange(0, H)[None, :]
    state = tl.load(before + own + place)
    result = tl.dot(queries, state, input_precision=PRECISION) * from_before[:, None]
    written = of_head(fixed, token, row, head, length, batch, heads, H, H)
    result += tl.dot(weights.to(written.dtype), written, input_precision=PRECISION)
    at = ((token * batch + row) * heads + head)[:, None] * H + tl.arange(0, H)[None, :]
    tl.store(y + at, result.to(y.dtype.element_ty), mask=(token < length)[:, None])


class _Rule(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        docs: Tensor | None,
        first: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        call = _Call(q, k, v, g, beta, docs, first)
        inverse, new, erased = call.corrections(None)
        before, fixed, end = call.states(new, erased)
        ctx.save_for_backward(q, k, v, g, beta, docs, first, inverse)
        return call.outputs(before, fixed), end

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dend: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, inverse = ctx.saved_tensors
        grads = _Call(*inputs).gradients(inverse, dy.contiguous(), dend.contiguous())
        return (*grads[:5], None, grads[5] if ctx.needs_input_grad[6] else None)


class _Call:
    """Arguments shared by all kernels."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        docs: Tensor | None,
        first: Tensor | None,
    ) -> None:
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.docs, self.first = docs, first
        self.length, self.batch, self.heads, self.channels = v.shape
        self.groups, self.numbers = k.shape[2:]
        self.chunks = -(-self.length // CHUNK)
        self.sizes = self.length, self.batch, self.heads, self.heads // self.groups
        self.per_head = self.chunks, self.batch * self.heads
        self.block = min(_BLOCK, self.channels)
        self.tiles = self.channels // self.block
        self.constants: dict[str, Any] = {
            "CHUNK": CHUNK,
            "K": self.numbers,
            "H": self.channels,
            "HAS_DOCS": docs is not None,
            "PRECISION": "ieee" if v.dtype == torch.float32 else "tf32",
        }

    def of_heads(self, *numbers: int) -> list[Tensor]:
        """Return empty tensors of these sizes for each token and value head."""
        return [self.v.new_empty(*self.v.shape[:3], number) for number in numbers]

    def corrections(self, inverse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return inverse systems, corrected values, and what keys erase from the state."""
        new, erased = self.of_heads(self.channels, self.numbers)
        solved = self.of_heads(CHUNK)[0] if inverse is None else inverse
        _corrections[self.per_head](
            *_strided(self.k),
            *_strided(self.v),
            *(self.g, self.beta, self.docs, solved, new, erased, *self.sizes),
            IS_SOLVED=inverse is not None,
            **_SYSTEM,
            **self.constants,
        )
        return solved, new, erased

    def states(self, new: Tensor, erased: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states before each chunk, the corrections, and the last state."""
        shape = (self.batch, self.heads, self.numbers, self.channels)
        before, fixed = self.v.new_empty(self.chunks, *shape), torch.empty_like(new)
        end = self.v.new_empty(shape, dtype=torch.float32)
        _states[self.batch * self.heads, self.tiles](
            *_strided(self.k),
            *(new, erased, self.g, self.docs, self.first, before, fixed, end, *self.sizes),
            BLOCK=self.block,
            HAS_FIRST=self.first is not None,
            **_STATES,
            **self.constants,
        )
        return before, fixed, end

    def outputs(self, before: Tensor, fixed: Tensor) -> Tensor:
        y = self.of_heads(self.channels)[0]
        _outputs[self.per_head](
            *_strided(self.q),
            *_strided(self.k),
            *(self.g, self.docs, before, fixed, y, *self.sizes),
            **_OUTPUTS,
            **self.constants,
        )
        return y

    def gradients(self, inverse: Tensor, dy: Tensor, dend: Tensor) -> list[Tensor]:
        """Return the gradients of q, k, v, g, beta and the first state."""
        _, new, erased = self.corrections(inverse)
        before, fixed, _ = self.states(new, erased)
        inputs = *_strided(self.q), *_strided(self.k), self.g
        dfixed, derased = torch.empty_like(fixed), torch.empty_like(erased)
        correction_gradients[self.per_head](
            *(*inputs, self.docs, dy, dfixed, *self.sizes), **_OUTPUTS, **self.constants
        )
        dafter, dfirst = torch.empty_like(before), torch.empty_like(dend)
        wide: dict[str, Any] = {"dtype": torch.float32, "device": dy.device}
        passed = torch.empty(self.tiles, self.chunks, self.batch, self.heads, **wide)
        state_gradients[self.batch * self.heads, self.tiles](
            *inputs,
            *(self.docs, erased, before, dy, dend, dfixed, dafter, dfirst, passed, *self.sizes),
            BLOCK=self.block,
            **_STATES,
            **self.constants,
        )
        dq, dk = (torch.empty(self.k.shape, **wide) for _ in range(2))
        dg, dbeta = torch.empty_like(self.g), torch.empty_like(self.beta)
        per_group = self.chunks, self.batch * self.groups
        options = {"TILE": min(_TILE, self.numbers, self.channels), **self.constants}
        output_gradients[per_group](
            *(*inputs, self.docs, before, fixed, dafter, dy, dfixed, passed),
            *(dq, dk, dg, derased, *self.sizes, self.tiles),
            **_GRADIENTS,
            **options,
        )
        dv = torch.empty(self.v.shape, device=dy.device, dtype=self.v.dtype)
        system_gradients[per_group](
            *_strided(self.k),
            *_strided(self.v),
            *(self.g, self.beta, self.docs, inverse, new, erased, dfixed, derased),
            *(dk, dv, dg, dbeta, *self.sizes),
            **_GRADIENTS,
            **options,
        )
        return [dq.to(self.q.dtype), dk.to(self.k.dtype), dv, dg, dbeta, dfirst]


def _strided(x: Tensor) -> tuple[Tensor, int, int]:
    return x, x.stride(0), x.stride(1)


def delta_rule_plain(
    q: Float[Tensor, "S B G K"],
    k: Float[Tensor, "S B G K"],
    v: Float[Tensor, "S B N H"],
    g: Float[Tensor, "S B N *K"],
    beta: Float[Tensor, "S B N"],
    *,
    chunk_size: int = CHUNK,
    starts: Bool[Tensor, "S B"] | None = None,
    state: Float[Tensor, "B N K H"] | None = None,
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "B N K H"]]:
    """Compute ``gated_delta_rule`` in plain torch, the reference."""
    length, heads = v.shape[0], v.shape[2]
    wide = torch.promote_types(v.dtype, torch.float32)
    size = min(chunk_size, length)
    q, k = (x.to(wide).repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    q, k, values = (_chunks(x, size) for x in (q, k, v.to(wide)))  # [b, N, c, Q, K or H]
    by_channel = g.dim() == 4
    # [b, N, c, Q, K], or [b, N, c, Q, 1] with one decay for each head.
    decay = _chunks(g.to(wide) if by_channel else g.to(wide)[..., None], size)
    share = _chunks(beta.to(wide)[..., None], size)  # [b, N, c, Q, 1]
    sums = decay.cumsum(3)
    last = sums[:, :, :, -1:]  # the decay over the complete chunk
    sees = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    from_before, to_end, over = sums.exp(), (last - sums).exp(), last.exp()
    if starts is not None:
        documents = F.pad(starts, (0, 0, 0, -length % size)).t().long().cumsum(1)
        mine = documents.unflatten(1, (-1, size))[:, None]  # [b, 1, c, Q]
        ends = mine[..., -1:]
        previous = F.pad(ends[:, :, :-1], (0, 0, 1, 0))
        sees = sees & (mine[..., :, None] == mine[..., None, :])
        from_before = from_before * (mine == previous)[..., None]
        to_end = to_end * (mine == ends)[..., None]
        over = over * (ends == previous)[..., None]
    # Decayed products of the keys, and of the queries, with the keys of a chunk, each
    # [b, N, c, Q, Q]; 0 above the diagonal.
    if by_channel:
        of_keys, of_queries = _DecayedProducts.apply(torch.stack([k, q]), k, sums) * sees
    else:
        # Masked before exp: the sum above the diagonal is unbounded.
        inside = (sums - sums.transpose(3, 4)).masked_fill(~sees, -torch.inf).exp()
        of_keys, of_queries = (x @ k.transpose(3, 4) * inside for x in (k, q))

    system = (share * of_keys).tril(-1)
    known = torch.cat([share * values, share * from_before * k], -1)
    solved = torch.linalg.solve_triangular(
        system + torch.eye(size, dtype=wide, device=v.device),
        known,
        upper=False,
        unitriangular=True,
    )
    new, erased = solved.split((values.shape[-1], k.shape[-1]), -1)
    memory = values.new_zeros(*values.shape[:2], k.shape[-1], values.shape[-1])
    if state is not None:
        memory = state.to(wide)
    before, corrections = [], []
    kept, over = (to_end * k).transpose(3, 4), over.transpose(3, 4)
    for chunk in range(values.shape[2]):
        before.append(memory)
        corrections.append(new[:, :, chunk] - erased[:, :, chunk] @ memory)
        memory = over[:, :, chunk] * memory + kept[:, :, chunk] @ corrections[-1]
    read = (from_before * q) @ torch.stack(before, 2)
    y = read + of_queries @ torch.stack(corrections, 2)
    return y.flatten(2, 3)[:, :, :length].permute(2, 0, 1, 3).to(v.dtype), memory


class _DecayedProducts(OnceDifferentiable):
    """Products of rows a_i with rows b_j of earlier tokens, decayed by channel from j to i.

    ``P_ij = sum_c a_ic b_jc e^{G_ic - G_jc}`` for j <= i, else 0, with G = ``sums``. Computes
    one token j at a time, so that neither pass has a tensor of Q x Q x K numbers in memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        a: Float[Tensor, "2 *B Q K"],
        b: Float[Tensor, "*B Q K"],
        sums: Float[Tensor, "*B Q K"],
    ) -> Float[Tensor, "2 *B Q Q"]:
        ctx.save_for_backward(a, b, sums)
        products = a.new_zeros(*a.shape[:-1], a.shape[-2])
        for j in range(a.shape[-2]):
            later = slice(j, None)
            decayed = b[..., [j], :] * (sums[..., later, :] - sums[..., [j], :]).exp()
            products[..., later, j] = (a[..., later, :] * decayed).sum(-1)
        return products

    @staticmethod
    def backward(ctx: Any, dproducts: Tensor) -> tuple[Tensor, ...]:
        a, b, sums = ctx.saved_tensors
        da, db = torch.zeros_like(a), torch.empty_like(b)
        for j in range(a.shape[-2]):
            later = slice(j, None)
            decay = (sums[..., later, :] - sums[..., [j], :]).exp()
            weights = dproducts[..., later, [j]] * decay
            da[..., later, :] += weights * b[..., [j], :]
            db[..., j, :] = (weights * a[..., later, :]).sum((0, -2))
        # P depends on a_i e^{G_i} and b_j e^{-G_j} only, so dG = a da - b db.
        return da, db, (a * da).sum(0) - b * db


def _chunks(x: Tensor, size: int) -> Tensor:
    """Split ``[S, b, N, X]`` into ``[b, N, c, Q, X]``, padded with neutral zeros."""
    padded = F.pad(x, (0, 0, 0, 0, 0, 0, 0, -x.shape[0] % size))
    return padded.permute(1, 2, 0, 3).unflatten(2, (-1, size))


def kernel_widths(keys: int, values: int) -> tuple[int, int] | None:
    """Return the widths of keys and values that kernels compute with; None: unsupported.

    Args:
        keys: channels of a key, K.
        values: channels of a value, H.
    """
    fitting = [pair for pair in RAN_ON_GPU if pair[0] >= keys]
    chosen = [pair for pair in fitting if pair[1] >= values] or fitting[-1:]
    return chosen[0] if chosen else None


def _kind(k: Tensor, v: Tensor, g: Tensor) -> Any:
    widths = kernel_widths(k.shape[-1], v.shape[-1])
    is_by_head = g.dim() == 3  # the kernels have one decay for each head
    return (v.dtype, *widths) if widths and is_by_head and v.dtype in NARROW else None


def _samples(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    numbers: int = 128,
    channels: int = 128,
) -> Iterator[Sample]:
    wide: dict[str, Any] = {"device": device, "dtype": torch.float32}
    keys = F.normalize(wave(150, 1, 1, numbers, **wide), dim=-1)
    inputs = [
        keys.flip(0).to(dtype),
        keys.to(dtype),
        wave(150, 1, 2, channels, device=device, dtype=dtype),
        wave(150, 1, 2, **wide).abs() * -0.2,
        wave(150, 1, 2, **wide).abs(),
    ]
    yield Sample(*(x.requires_grad_() for x in inputs))


@optional_kernel(
    "the gated delta rule in Triton",
    reference=delta_rule_plain,
    kind=_kind,
    samples=_samples,
)
def gated_delta_rule(
    q: Float[Tensor, "S B G K"],
    k: Float[Tensor, "S B G K"],
    v: Float[Tensor, "S B N H"],
    g: Float[Tensor, "S B N *K"],
    beta: Float[Tensor, "S B N"],
    *,
    chunk_size: int = CHUNK,  # noqa: ARG001 - of the reference
    starts: Bool[Tensor, "S B"] | None = None,
    state: Float[Tensor, "B N K H"] | None = None,
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "B N K H"]]:
    """Compute the recurrence over complete sequences; no communication.

    Args:
        q: queries, already scaled.
        k: keys of length 1, without which the state may grow without bound.
        v: values.
        g: logarithms of the decay, 0 or less: one for each head ``[S, B, N]``, or one for each
            channel of a head's keys ``[S, B, N, K]``.
        beta: share of a key's stored value that is replaced, from 0 to 1.
        chunk_size: tokens of a chunk; kernels use their own.
        starts: tokens before which the state is reset: the first of each packed document.
        state: state before the first token; None: zeros.

    Returns:
        The outputs in the dtype of ``v``, and the state after the last token, float32 or
        wider, like all intermediate results. In the kernels GEMMs read the dtype of ``v``,
        and the states between chunks have it too.
    """
    widths = kernel_widths(k.shape[-1], v.shape[-1])
    assert widths is not None
    return in_widths(launch_widths, widths, q, k, v, g, beta, starts=starts, state=state)


def in_widths(
    rule: Callable[..., tuple[Tensor, Tensor]],
    widths: tuple[int, int],
    q: Float[Tensor, "S B G K"],
    k: Float[Tensor, "S B G K"],
    v: Float[Tensor, "S B N H"],
    g: Float[Tensor, "S B N"],
    beta: Float[Tensor, "S B N"],
    *,
    starts: Bool[Tensor, "S B"] | None = None,
    state: Float[Tensor, "B N K H"] | None = None,
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "B N K H"]]:
    """Return ``gated_delta_rule``, computed by a rule for keys and values of other widths.

    Zero padding of keys and values changes nothing. The columns of a state are independent, so
    a wider value is split into several heads with the same decay, share and key.
    """
    numbers, channels, heads = k.shape[-1], v.shape[-1], v.shape[2]
    width = widths[1]
    blocks = -(-channels // width)
    more = widths[0] - numbers, blocks * width - channels
    if (blocks, *more) == (1, 0, 0):
        return rule(q, k, v, g, beta, starts=starts, state=state)
    q, k = (F.pad(x, (0, more[0])) for x in (q, k))
    v = F.pad(v, (0, more[1])).view(*v.shape[:2], heads * blocks, width)
    g, beta = (x.repeat_interleave(blocks, 2) for x in (g, beta))
    if state is not None:
        state = F.pad(state, (0, more[1], 0, more[0])).unflatten(3, (blocks, width))
        state = state.movedim(3, 2).flatten(1, 2)  # [B, N blocks, K, H of a block]
    y, end = rule(q, k, v, g, beta, starts=starts, state=state)
    end = end.unflatten(1, (heads, blocks)).movedim(2, 3).flatten(3)
    return (
        y.reshape(*y.shape[:2], heads, blocks * width)[..., :channels],
        end[:, :, :numbers, :channels],
    )


def launch_widths(
    q: Float[Tensor, "S B G K"],
    k: Float[Tensor, "S B G K"],
    v: Float[Tensor, "S B N H"],
    g: Float[Tensor, "S B N"],
    beta: Float[Tensor, "S B N"],
    *,
    starts: Bool[Tensor, "S B"] | None = None,
    state: Float[Tensor, "B N K H"] | None = None,
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "B N K H"]]:
    """Launch the kernels without padding; K and H are powers of two, from 16 to 128."""
    q, k, v = (_dense(x.to(v.dtype)) for x in (q, k, v))
    docs: Int[Tensor, "S B"] | None = None
    if starts is not None:
        docs = starts.cumsum(0, dtype=torch.int32)
    first = None if state is None else state.float().contiguous()
    g, beta = g.float().contiguous(), beta.float().contiguous()
    return _Rule.apply(q, k, v, g, beta, docs, first)


def _dense(x: Tensor) -> Tensor:
    """Make the last two dimensions contiguous; strides of tokens may be arbitrary."""
    is_dense = x.stride(3) == 1 and x.stride(2) == x.shape[3]
    return x if is_dense else x.contiguous()
