"""The gated delta rule: a state that decays, and is corrected where a key points, by chunks.

Every head keeps a state M of K x H numbers. A token lets it decay, replaces what it holds
under the token's key by a share of the token's value, and reads it by the token's query:

    M_t = e^{g_t} M_{t-1}
    M_t = M_t + k_t (beta_t (v_t - M_t^T k_t))^T        o_t = M_t^T q_t

Inside a chunk of Q tokens each correction depends on the earlier ones, through a lower
triangular system of Q equations: with A_ij = beta_i (k_i . k_j) e^{G_i - G_j} for j < i and G
the running sum of g, the corrections are (I + A)^{-1} (beta V - beta e^G K M). So most of the
work is GEMMs, only the states at the chunks' ends are sequential, and the result does not
depend on Q but for rounding. A step of generation is the same maths with one token.
``delta_rule_plain`` is the reference; ``kernels.delta`` is its fast form on a GPU.

N heads with values of H channels, G key heads (each the query and key of N / G neighbouring
heads) of K channels.

Reference:
    Yang et al. 2024, Gated Delta Networks, arXiv:2412.06464, section 3; the triangular form,
    Yang et al. 2024, arXiv:2406.06484, section 3.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from mcore_models.layers.recurrent.kernel_fit import may_take
from mcore_parallel.optional_kernels import OptionalKernel, both_passes, wave

CHUNK = 64
"""Tokens of a chunk, Q; memory grows with S x Q, the sequential steps with S / Q."""
RAN_ON_GPU = ((128, 128),)
"""Channels of keys and values that the kernels are right with on an H200, least first: 16 x 16
gave NaN and 64 x 32 errors of 1, so others are not tried. Narrower keys and values get zeros
behind; wider values are cut into several heads, which are independent."""


def gated_delta_rule(
    q: Float[Tensor, "S B G K"],
    k: Float[Tensor, "S B G K"],
    v: Float[Tensor, "S B N H"],
    g: Float[Tensor, "S B N"],
    beta: Float[Tensor, "S B N"],
    *,
    chunk_size: int = CHUNK,
    starts: Bool[Tensor, "S B"] | None = None,
    state: Float[Tensor, "B N K H"] | None = None,
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "B N K H"]]:
    """Run the recurrence over whole sequences; no communication.

    Args:
        q: queries, already scaled.
        k: keys; of length 1, else the state may grow without bound.
        v: values.
        g: logarithms of the decay, 0 or less.
        beta: share of what a key holds that is replaced, from 0 to 1.
        chunk_size: tokens of a chunk; kernels have their own.
        starts: tokens before which the state is cleared: the first of each packed document.
        state: before the first token; None: zeros.

    Returns:
        The outputs in the dtype of ``v``, and the state after the last token, float32 or
        wider, as all that is computed between.
    """
    widths = kernel_widths(k.shape[-1], v.shape[-1])
    if widths and may_take(DELTA_KERNELS, v, *widths):
        from mcore_models.kernels.delta import fused_delta_rule

        return in_widths(fused_delta_rule, widths, q, k, v, g, beta, starts=starts, state=state)
    return delta_rule_plain(q, k, v, g, beta, chunk_size=chunk_size, starts=starts, state=state)


def kernel_widths(keys: int, values: int) -> tuple[int, int] | None:
    """Return the widths of keys and values that kernels compute with; None: plain torch does.

    Args:
        keys: channels of a key, K.
        values: channels of a value, H.
    """
    fitting = [pair for pair in RAN_ON_GPU if pair[0] >= keys]
    chosen = [pair for pair in fitting if pair[1] >= values] or fitting[-1:]
    return chosen[0] if chosen else None


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
    """Compute ``gated_delta_rule`` by a rule for keys and values of other widths.

    Zeros behind a key or a value change nothing. The columns of a state are independent: a
    value that is wider is cut into several heads that share decay, share and key.
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


def _try_kernels(
    device: torch.device, dtype: torch.dtype, numbers: int, channels: int
) -> list[tuple[Tensor, Tensor]]:
    from mcore_models.kernels.delta import fused_delta_rule

    wide = {"device": device, "dtype": torch.float32}
    keys = F.normalize(wave(150, 1, 1, numbers, **wide), dim=-1)
    inputs = [
        keys.flip(0).to(dtype),
        keys.to(dtype),
        wave(150, 1, 2, channels, device=device, dtype=dtype),
        wave(150, 1, 2, **wide).abs() * -0.2,
        wave(150, 1, 2, **wide).abs(),
    ]
    got, want = (both_passes(rule, *inputs) for rule in (fused_delta_rule, delta_rule_plain))
    return list(zip(got, want, strict=True))


DELTA_KERNELS = OptionalKernel("the gated delta rule in Triton", ("triton",), _try_kernels)


def delta_rule_plain(
    q: Float[Tensor, "S B G K"],
    k: Float[Tensor, "S B G K"],
    v: Float[Tensor, "S B N H"],
    g: Float[Tensor, "S B N"],
    beta: Float[Tensor, "S B N"],
    *,
    chunk_size: int = CHUNK,
    starts: Bool[Tensor, "S B"] | None = None,
    state: Float[Tensor, "B N K H"] | None = None,
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "B N K H"]]:
    """Compute ``gated_delta_rule`` in plain torch; all arguments are as there."""
    length, heads = v.shape[0], v.shape[2]
    wide = torch.promote_types(v.dtype, torch.float32)
    size = min(chunk_size, length)
    q, k = (x.to(wide).repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    q, k, values = (_chunks(x, size) for x in (q, k, v.to(wide)))  # [b, N, c, Q, K or H]
    decay, share = (_chunks(x.to(wide)[..., None], size) for x in (g, beta))  # [b, N, c, Q, 1]
    sums = decay.cumsum(3)
    last = sums[:, :, :, -1:]  # the decay over the whole chunk
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
    # Masked before exp: the sum above the diagonal grows without bound.
    inside = (sums - sums.transpose(3, 4)).masked_fill(~sees, -torch.inf).exp()  # [.., Q, Q]

    system = (share * (k @ k.transpose(3, 4)) * inside).tril(-1)
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
    kept = (to_end * k).transpose(3, 4)
    for chunk in range(values.shape[2]):
        before.append(memory)
        corrections.append(new[:, :, chunk] - erased[:, :, chunk] @ memory)
        memory = over[:, :, chunk] * memory + kept[:, :, chunk] @ corrections[-1]
    read = (from_before * q) @ torch.stack(before, 2)
    y = read + ((q @ k.transpose(3, 4)) * inside) @ torch.stack(corrections, 2)
    return y.flatten(2, 3)[:, :, :length].permute(2, 0, 1, 3).to(v.dtype), memory


def _chunks(x: Tensor, size: int) -> Tensor:
    """Cut ``[S, b, N, X]`` into ``[b, N, c, Q, X]``; zeros behind leave the state as it is."""
    padded = F.pad(x, (0, 0, 0, 0, 0, 0, 0, -x.shape[0] % size))
    return padded.permute(1, 2, 0, 3).unflatten(2, (-1, size))
