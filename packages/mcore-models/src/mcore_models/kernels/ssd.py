"""State-space duality: the recurrence of Mamba-2 over a sequence, computed by chunks of tokens.

Every head has a state of H x K numbers, which decays, is updated by the token and is read:
    state_t = exp(dt_t A) state_{t-1} + dt_t x_t B_t^T        y_t = state_t C_t + D x_t

Inside a chunk of Q tokens this is attention without softmax, C_t B_s^T weighted by the decay
from s to t; across chunks only the states at their ends matter. So most of the work is GEMMs,
and the result does not depend on Q except for rounding. A step of generation is the same
computation with one token.

N heads of H channels, G groups (each the B and C of N / G neighbouring heads), K numbers of
state for a channel.

In the Triton kernels only the states at the chunks' ends are sequential: one kernel loops over
the chunks of a head, keeps the state in registers and writes the state before each chunk;
another loops backwards over gradients. Everything else is computed chunk by chunk, all heads of
a group one after another in one program, so that their common data (B, C and the scores C B^T)
is loaded and computed once, and the gradients of B and C are summed in registers. No tensor of
S x Q numbers is in memory.

Reference:
    Dao and Gu 2024, Transformers are SSMs, arXiv:2405.21060, section 6.
"""

from collections.abc import Iterator
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mcore_models.kernels.ssd_backward import group_gradients, input_gradients, state_gradients
from mcore_models.kernels.ssd_chunks import decays, inside_chunk, of_group
from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave

WIDTHS = (16, 32, 64, 128)
"""Channels of a head, and sizes of state, that the kernels were tested with."""
NARROW = (torch.bfloat16, torch.float16)
"""Dtypes of the kernels: their exact float32 GEMMs compile for half a minute."""
CHUNK = 64
"""Tokens of a chunk."""
_PROGRAMS = 256
"""Number of programs that keep a GPU busy, among which heads are divided."""
_STATES = {"num_warps": 4, "num_stages": 3}
_OUTPUTS = {"num_warps": 4, "num_stages": 2}
_INPUTS = {"num_warps": 4, "num_stages": 1}
_GROUPS = {"num_warps": 4, "num_stages": 1}
"""Compilation options of each kernel: as many registers as fit without spills."""


@triton.jit(do_not_specialize=["length", "batch", "heads", "per_group"])
@no_type_check
def _states(
    x, x_token, x_row, dt, A, B, B_token, B_row, docs, first, before, end,
    length, batch, heads, per_group,
    CHUNK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    HAS_DOCS: tl.constexpr, HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Loop over the chunks of a head: write the state before each, and the last."""
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    group = head // per_group
    channel = tl.arange(0, H)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = channel[:, None] * K + number[None, :]
    own = tl.program_id(0).to(tl.int64) * (H * K)
    state = tl.zeros([H, BLOCK], tl.float32)
    if HAS_FIRST:
        state += tl.load(first + own + place).to(tl.float32)
    for chunk in range(tl.cdiv(length, CHUNK)):
        at = (chunk * batch * heads + tl.program_id(0)).to(tl.int64) * (H * K) + place
        tl.store(before + at, state.to(before.dtype.element_ty))
        step, _, over, _, to_end, _ = decays(
            dt, A, docs, head, row, chunk, length, batch, heads, CHUNK, HAS_DOCS
        )
        token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
        inside = token < length
        entering = tl.load(
            x + token[None, :] * x_token + row * x_row + head * H + channel[:, None],
            mask=inside[None, :],
            other=0.0,
        )
        written = tl.load(
            B + token[:, None] * B_token + row * B_row + group * K + number[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        # Each token adds dt x B^T, decayed until the end of the chunk.
        entering = (entering * (step * to_end)[None, :]).to(written.dtype)
        state = state * over + tl.dot(entering, written, input_precision=PRECISION)
    tl.store(end + own + place, state)


@triton.jit(do_not_specialize=["length", "batch", "heads", "groups", "heads_here"])
@no_type_check
def _outputs(
    x, x_token, x_row, dt, A, B, B_token, B_row, C, C_token, C_row, D, docs, before, y,
    length, batch, heads, groups, heads_here,
    CHUNK: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    HAS_DOCS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a chunk's outputs for some heads, from its tokens and the state before."""
    chunk, row, group = tl.program_id(0), tl.program_id(1) // groups, tl.program_id(1) % groups
    token = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = (token < length)[:, None]
    channel, number = tl.arange(0, H), tl.arange(0, K)
    written = of_group(B, B_token, B_row, token, row, group, length, K, K)
    read = of_group(C, C_token, C_row, token, row, group, length, K, K)
    scores = tl.dot(read, tl.trans(written), input_precision=PRECISION)
    first_head = group * (heads // groups) + tl.program_id(2) * heads_here
    for number_of_head in range(heads_here):
        head = first_head + number_of_head
        step, sums, _, from_before, _, mine = decays(
            dt, A, docs, head, row, chunk, length, batch, heads, CHUNK, HAS_DOCS
        )
        # [Q, Q]: C_t . B_s times the decay from s to t and dt_s; zero for s > t.
        weights = scores * inside_chunk(sums, mine, CHUNK, HAS_DOCS) * step[None, :]
        at = row * x_row + head * H + channel[None, :]
        entering = tl.load(x + token[:, None] * x_token + at, mask=inside, other=0.0)
        own = ((chunk * batch + row) * heads + head).to(tl.int64) * H * K
        state = tl.load(before + own + channel[None, :] * K + number[:, None])  # [K, H]
        # The state before the chunk, the tokens of the chunk, and D x.
        result = tl.dot(read, state, input_precision=PRECISION) * from_before[:, None]
        result += tl.dot(weights.to(entering.dtype), entering, input_precision=PRECISION)
        result += entering.to(tl.float32) * tl.load(D + head).to(tl.float32)
        at = (token[:, None] * batch + row) * heads * H + head * H + channel[None, :]
        tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


class _Scan(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        docs: Tensor | None,
        first: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        call = _Call(x, dt, A, B, C, D, docs, first)
        before, end = call.states()
        y = call.outputs(before)
        ctx.save_for_backward(x, dt, A, B, C, D, docs, first)
        return y, end

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dend: Tensor) -> tuple[Tensor | None, ...]:
        call = _Call(*ctx.saved_tensors)
        before, _ = call.states()
        grads = call.gradients(before, dy.contiguous(), dend.contiguous())
        needed = ctx.needs_input_grad
        return (*grads[:6], None, grads[6] if needed[7] else None)


class _Call:
    """Arguments shared by all kernels."""

    def __init__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        docs: Tensor | None,
        first: Tensor | None,
    ) -> None:
        self.x, self.dt, self.A, self.B, self.C, self.D = x, dt, A, B, C, D
        self.docs, self.first = docs, first
        self.length, self.batch, self.heads, self.channels = x.shape
        self.groups, self.numbers = B.shape[2:]
        self.chunks = -(-self.length // CHUNK)
        self.constants: dict[str, Any] = {
            "CHUNK": CHUNK,
            "H": self.channels,
            "K": self.numbers,
            "HAS_DOCS": docs is not None,
            "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        }
        self.block = min(64, self.numbers)
        self.tiles = self.numbers // self.block

    def states(self) -> tuple[Tensor, Tensor]:
        """Return the states before each chunk, in the inputs' dtype, and the last."""
        shape = (self.batch, self.heads, self.channels, self.numbers)
        before = self.x.new_empty(self.chunks, *shape)
        end = self.x.new_empty(shape, dtype=torch.float32)
        first = self.first
        _states[(self.batch * self.heads, self.tiles)](
            *_strided(self.x),
            self.dt,
            self.A,
            *_strided(self.B),
            self.docs,
            first,
            before,
            end,
            *(self.length, self.batch, self.heads, self.heads // self.groups),
            BLOCK=self.block,
            HAS_FIRST=first is not None,
            **_STATES,
            **self.constants,
        )
        return before, end

    def outputs(self, before: Tensor) -> Tensor:
        y = torch.empty(self.x.shape, device=self.x.device, dtype=self.x.dtype)
        heads = self._heads_of_program()
        _outputs[self._grid(heads)](
            *_strided(self.x),
            self.dt,
            self.A,
            *_strided(self.B),
            *_strided(self.C),
            self.D,
            self.docs,
            before,
            y,
            *(self.length, self.batch, self.heads, self.groups, heads),
            **_OUTPUTS,
            **self.constants,
        )
        return y

    def gradients(self, before: Tensor, dy: Tensor, dend: Tensor) -> list[Tensor]:
        """Return the gradients of x, dt, A, B, C, D and the first state."""
        new = self.x.new_empty
        wide: dict[str, Any] = {"dtype": torch.float32}
        dafter, dfirst = torch.empty_like(before), torch.empty_like(dend)
        passed = new((self.tiles, self.chunks, self.batch, self.heads), **wide)
        sizes = self.length, self.batch, self.heads
        state_gradients[(self.batch * self.heads, self.tiles)](
            dy,
            self.dt,
            self.A,
            *_strided(self.C),
            self.docs,
            before,
            dend,
            dafter,
            dfirst,
            passed,
            *(*sizes, self.heads // self.groups),
            BLOCK=self.block,
            **_STATES,
            **self.constants,
        )
        heads = self._heads_of_program()
        grid = self._grid(heads)
        dx, ddt = new(self.x.shape), new(self.dt.shape, **wide)
        dA, dD = (new((self.chunks, self.batch, self.heads), **wide) for _ in range(2))
        dB, dC = (new((grid[2], *self.B.shape), **wide) for _ in range(2))
        inputs = *_strided(self.x), self.dt, self.A, *_strided(self.B), *_strided(self.C)
        input_gradients[grid](
            *inputs,
            *(self.D, self.docs, before, dafter, passed, dy),
            *(dx, ddt, dA, dD),
            *(*sizes, self.groups, heads, self.tiles),
            **_INPUTS,
            **self.constants,
        )
        group_gradients[*grid[:2], grid[2] * self.tiles](
            *inputs,
            *(self.docs, before, dafter, dy),
            *(dB, dC),
            *(*sizes, self.groups, heads),
            BLOCK=self.block,
            **_GROUPS,
            **self.constants,
        )
        summed = dA.sum((0, 1)), dB.sum(0).to(self.B.dtype), dC.sum(0).to(self.C.dtype)
        return [dx, ddt, *summed, dD.sum((0, 1)).to(self.D.dtype), dfirst]

    def _heads_of_program(self) -> int:
        """Return the largest number of heads of a program with which programs fill the GPU."""
        per_group, others = self.heads // self.groups, self.chunks * self.batch * self.groups
        fitting = [n for n in range(1, per_group + 1) if per_group % n == 0]
        return max(n for n in fitting if n == 1 or others * (per_group // n) >= _PROGRAMS)

    def _grid(self, heads: int) -> tuple[int, int, int]:
        return self.chunks, self.batch * self.groups, self.heads // self.groups // heads


def _strided(x: Tensor) -> tuple[Tensor, int, int]:
    return x, x.stride(0), x.stride(1)


def ssd_plain(
    x: Float[Tensor, "S B N H"],
    dt: Float[Tensor, "S B N"],
    A: Float[Tensor, " N"],
    B: Float[Tensor, "S B G K"],
    C: Float[Tensor, "S B G K"],
    D: Float[Tensor, " N"],
    *,
    chunk_size: int = 128,
    starts: Bool[Tensor, "S B"] | None = None,
    state: Float[Tensor, "B N H K"] | None = None,
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "B N H K"]]:
    """Compute ``ssd`` in plain torch, the reference."""
    length, wide = x.shape[0], torch.promote_types(x.dtype, torch.float32)
    size = min(chunk_size, length)
    groups = B.shape[2]
    step = dt.to(wide)
    decay = _chunks((step * A.to(wide)).unflatten(2, (groups, -1)), size)  # [c, Q, b, G, R]
    entering = step[..., None] * x.to(wide)
    entering = _chunks(entering.unflatten(2, (groups, -1)), size)  # [c, Q, b, G, R, H]
    B_, C_ = (_chunks(part.to(wide), size) for part in (B, C))  # [c, Q, b, G, K]
    sums = decay.cumsum(1)
    last = sums[:, -1]  # [c, b, G, R]: the decay over the complete chunk
    documents = None
    if starts is not None:
        documents = _chunks(starts, size).flatten(0, 1).cumsum(0).unflatten(0, (-1, size))

    y = _inside_chunks(sums, entering, B_, C_, documents)
    to_end = (last[:, None] - sums).exp()
    if documents is not None:
        to_end = to_end * _alike(documents, documents[:, -1:], to_end)
    added = torch.einsum("cqbgrh,cqbgk->cbgrhk", entering * to_end[..., None], B_)
    first = x.new_zeros(added.shape[1:], dtype=wide)
    if state is not None:
        first = state.to(wide).unflatten(1, (groups, -1))
    before, end = _carry(first, last, added, documents)
    from_before = sums.exp()
    if documents is not None:
        ends = documents[:, -1:]
        previous = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
        from_before = from_before * _alike(documents, previous, from_before)
    read = torch.einsum("cqbgk,cbgrhk->cqbgrh", C_, before)
    y = y + from_before[..., None] * read
    y = y.flatten(0, 1)[:length].flatten(2, 3)  # [c, Q, b, G, R, H] -> [S, b, N, H]
    return (y + D[:, None].to(wide) * x.to(wide)).to(x.dtype), end.flatten(1, 2)


def _chunks(x: Tensor, size: int) -> Tensor:
    """Split along dimension 0; padding zeros do not change the state."""
    padding = -x.shape[0] % size
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, padding]).unflatten(0, (-1, size))


def _alike(documents: Tensor, others: Tensor, like: Tensor) -> Tensor:
    """Return 1 where tokens of ``[c, Q, b]`` belong to the same document as others, else 0."""
    return (documents == others)[..., None, None].to(like.dtype)


def _inside_chunks(
    sums: Tensor, entering: Tensor, B: Tensor, C: Tensor, documents: Tensor | None
) -> Tensor:
    """Return the outputs of tokens from the tokens of their own chunk."""
    size = sums.shape[1]
    at = sums.movedim(1, -1)  # [c, b, G, R, Q]
    sees = torch.ones(size, size, dtype=torch.bool, device=sums.device).tril()
    if documents is not None:
        mine = documents.movedim(1, -1)  # [c, b, Q]
        sees = sees & (mine[..., :, None] == mine[..., None, :])[:, :, None, None]
    # Masked before exp: the sum above the diagonal is unbounded.
    decay = (at[..., :, None] - at[..., None, :]).masked_fill(~sees, -torch.inf).exp()
    scores = torch.einsum("cqbgk,csbgk->cbgqs", C, B)
    return torch.einsum("cbgrqs,csbgrh->cqbgrh", decay * scores[:, :, :, None], entering)


def _carry(
    first: Tensor, last: Tensor, added: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the states before all chunks ``[c, b, G, R, H, K]``, and after the last."""
    state, before = first, []
    kept = last.exp()
    if documents is not None:
        ends = documents[:, -1]  # [c, b]
        previous = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
        kept = kept * (ends == previous)[..., None, None].to(kept.dtype)
    for share, new in zip(kept, added, strict=True):
        before.append(state)
        state = share[..., None, None] * state + new
    return torch.stack(before), state


def is_kernel_width(channels: int, numbers: int) -> bool:
    """Return whether the kernels support heads of these sizes."""
    return channels in WIDTHS and numbers in WIDTHS


def _kind(x: Tensor, B: Tensor) -> Any:
    widths = x.shape[-1], B.shape[-1]
    return (x.dtype, *widths) if x.dtype in NARROW and is_kernel_width(*widths) else None


def _samples(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    channels: int = 16,
    numbers: int = 16,
) -> Iterator[Sample]:
    wide: dict[str, Any] = {"device": device, "dtype": torch.float32}
    narrow: dict[str, Any] = {"device": device, "dtype": dtype}
    inputs = [
        wave(150, 1, 2, channels, **narrow),
        wave(150, 1, 2, **wide).abs() * 0.2,
        -1 - wave(2, **wide).abs(),
        wave(150, 1, 1, numbers, **narrow),
        wave(150, 1, 1, numbers, **narrow).flip(0),
        wave(2, **narrow),
    ]
    yield Sample(*(x.requires_grad_() for x in inputs))


@optional_kernel(
    "the state-space form in Triton", reference=ssd_plain, kind=_kind, samples=_samples
)
def ssd(
    x: Float[Tensor, "S B N H"],
    dt: Float[Tensor, "S B N"],
    A: Float[Tensor, " N"],
    B: Float[Tensor, "S B G K"],
    C: Float[Tensor, "S B G K"],
    D: Float[Tensor, " N"],
    *,
    chunk_size: int = 128,  # noqa: ARG001 - of the reference
    starts: Bool[Tensor, "S B"] | None = None,
    state: Float[Tensor, "B N H K"] | None = None,
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "B N H K"]]:
    """Compute the recurrence over complete sequences; no communication.

    Args:
        x: inputs of each head.
        dt: step sizes, positive.
        A: decay rates, negative.
        B: input projections of the state.
        C: output projections of the state.
        D: factor of the input in the output.
        chunk_size: tokens of a chunk, Q; memory grows with S x Q, the rest of the work with
            S / Q. Kernels use their own.
        starts: tokens before which the state is reset: the first of each packed document.
        state: state before the first token; None: zeros.

    Returns:
        The outputs in the dtype of ``x``, and the state after the last token, float32 or
        wider, like all intermediate results. In the kernels states between chunks, which
        GEMMs read, are in the dtype of ``x``; backward recomputes them.
    """
    x, B, C = (_dense(part) for part in (x, B, C))
    docs: Int[Tensor, "S B"] | None = None
    if starts is not None:
        docs = starts.cumsum(0, dtype=torch.int32)
    first = None if state is None else state.float().contiguous()
    return _Scan.apply(x, dt.float().contiguous(), A.float(), B, C, D, docs, first)


def _dense(x: Tensor) -> Tensor:
    """Make the last two dimensions contiguous; strides of tokens may be arbitrary."""
    is_dense = x.stride(3) == 1 and x.stride(2) == x.shape[3]
    return x if is_dense else x.contiguous()
