"""State-space duality: the recurrence of Mamba-2 over a sequence, a chunk of tokens at a time.

Every head keeps a state of H x K numbers, which decays, takes the token in and is read:

    state_t = exp(dt_t A) state_{t-1} + dt_t x_t B_t^T        y_t = state_t C_t + D x_t

Inside a chunk of Q tokens this is attention without softmax, C_t B_s^T weighted by the decay
from s to t; across chunks only the states at their ends matter. So most of the work is GEMMs,
and the result does not depend on Q but for rounding. A step of generation is the same maths
with one token. ``ssd_plain`` is the reference; ``kernels.ssd`` is its fast form on a GPU.

N heads of H channels, G groups (each the B and C of N / G neighbouring heads), K numbers of
state for a channel.

Reference:
    Dao and Gu 2024, Transformers are SSMs, arXiv:2405.21060, section 6.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from mcore_models.layers.recurrent.kernel_fit import may_take
from mcore_parallel.optional_kernels import OptionalKernel, both_passes, wave

WIDTHS = (16, 32, 64, 128)
"""Channels of a head, and numbers of state, that the kernels ran with."""


def ssd(
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
    """Run the recurrence over whole sequences; no communication.

    Args:
        x: what each head takes in.
        dt: step sizes, positive.
        A: decay rates, negative.
        B: how a token enters the state.
        C: how it is read.
        D: share of the input that goes past the state.
        chunk_size: tokens of a chunk, Q; memory grows with S x Q, the rest of the work with
            S / Q. Kernels choose their own.
        starts: tokens before which the state is cleared: the first of each packed document.
        state: before the first token; None: zeros.

    Returns:
        The outputs in the dtype of ``x``, and the state after the last token, float32 or
        wider, as all that is computed between.
    """
    widths = x.shape[-1], B.shape[-1]
    if is_kernel_width(*widths) and may_take(SSD_KERNELS, x, *widths):
        from mcore_models.kernels.ssd import fused_ssd

        return fused_ssd(x, dt, A, B, C, D, starts=starts, state=state)
    return ssd_plain(x, dt, A, B, C, D, chunk_size=chunk_size, starts=starts, state=state)


def is_kernel_width(channels: int, numbers: int) -> bool:
    """Say whether kernels are made for heads of such sizes."""
    return channels in WIDTHS and numbers in WIDTHS


def _try_kernels(
    device: torch.device, dtype: torch.dtype, channels: int, numbers: int
) -> list[tuple[Tensor, Tensor]]:
    from mcore_models.kernels.ssd import fused_ssd

    wide = {"device": device, "dtype": torch.float32}
    inputs = [
        wave(150, 1, 2, channels, device=device, dtype=dtype),
        wave(150, 1, 2, **wide).abs() * 0.2,
        -1 - wave(2, **wide).abs(),
        wave(150, 1, 1, numbers, device=device, dtype=dtype),
        wave(150, 1, 1, numbers, device=device, dtype=dtype).flip(0),
        wave(2, device=device, dtype=dtype),
    ]
    got, want = (both_passes(function, *inputs) for function in (fused_ssd, ssd_plain))
    return list(zip(got, want, strict=True))


SSD_KERNELS = OptionalKernel("the state-space form in Triton", ("triton",), _try_kernels)


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
    """Compute ``ssd`` in plain torch; all arguments are as there."""
    length, wide = x.shape[0], torch.promote_types(x.dtype, torch.float32)
    size = min(chunk_size, length)
    groups = B.shape[2]
    step = dt.to(wide)
    decay = _chunks((step * A.to(wide)).unflatten(2, (groups, -1)), size)  # [c, Q, b, G, R]
    entering = step[..., None] * x.to(wide)
    entering = _chunks(entering.unflatten(2, (groups, -1)), size)  # [c, Q, b, G, R, H]
    B_, C_ = (_chunks(part.to(wide), size) for part in (B, C))  # [c, Q, b, G, K]
    sums = decay.cumsum(1)
    last = sums[:, -1]  # [c, b, G, R]: the decay over the whole chunk
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
    """Cut along dimension 0; zeros behind the last token leave the state as it is."""
    padding = -x.shape[0] % size
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, padding]).unflatten(0, (-1, size))


def _alike(documents: Tensor, others: Tensor, like: Tensor) -> Tensor:
    """Return 1 where tokens of ``[c, Q, b]`` belong to the document of others, else 0."""
    return (documents == others)[..., None, None].to(like.dtype)


def _inside_chunks(
    sums: Tensor, entering: Tensor, B: Tensor, C: Tensor, documents: Tensor | None
) -> Tensor:
    """What tokens read of the tokens of their own chunk."""
    size = sums.shape[1]
    at = sums.movedim(1, -1)  # [c, b, G, R, Q]
    sees = torch.ones(size, size, dtype=torch.bool, device=sums.device).tril()
    if documents is not None:
        mine = documents.movedim(1, -1)  # [c, b, Q]
        sees = sees & (mine[..., :, None] == mine[..., None, :])[:, :, None, None]
    # Masked before exp: the sum above the diagonal grows without bound.
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
