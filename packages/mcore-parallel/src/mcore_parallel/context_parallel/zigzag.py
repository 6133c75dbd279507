"""Splits sequences over the context ranks, and computes attention across the ranks.

Causal attention costs more towards the end of a sequence, so each of C ranks holds two of
2C chunks, one from either end: rank r has chunks r and 2C-1-r, in that order ("zigzag").
Tokens, labels, loss mask and positions are split in this order before the model; inside the
model only attention communicates. Two exact forms are here, for any causal attention on a rank
(windows, dropout): ``context_attention`` gathers keys and values, ``ulysses_attention``
exchanges heads for sequence (C must divide the query heads). Two faster forms, by blocks, are
in ``ring_attention`` and ``all_gather_attention``.

Zigzag order: Llama 3, Dubey et al. 2024, arXiv:2407.21783, section 3.3.2. Exchange of heads:
DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mcore_parallel.collectives import all_to_all, gather_partial_from
from mcore_parallel.mesh import Axis

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q ``[Sq, B, N, H]`` to k and v ``[Sk, B, G, H]`` on this rank, returning
``[Sq, B, N, H]``. The last query sees the last key: with Sk > Sq the mask is aligned at the
lower right."""


def zigzag_split(
    x: Shaped[Tensor, "*shape"], axis: Axis, dim: int = 0
) -> Shaped[Tensor, "*cut"]:
    """Return this rank's two chunks of a full sequence; no communication.

    Args:
        x: the full sequence along ``dim``, in natural order.
        axis: context ranks.
        dim: the sequence's dimension.

    Raises:
        ValueError: if the sequence does not divide into two chunks a rank.
    """
    if axis.size == 1:
        return x
    chunk = chunk_length(x.shape[dim], axis)
    first, second = (x.narrow(dim, i * chunk, chunk) for i in own_chunks(axis.rank, axis.size))
    return torch.cat([first, second], dim)


def zigzag_join(
    x: Shaped[Tensor, "*shape"], axis: Axis, dim: int = 0
) -> Shaped[Tensor, "*whole"]:
    """All-gather the ranks' chunks and return the full sequence in natural order.

    Backward reduce-scatters: each rank's gradient is one term of a sum.

    Args:
        x: this rank's two chunks along ``dim``.
        axis: context ranks.
        dim: the sequence's dimension.
    """
    if axis.size == 1:
        return x
    dim %= x.dim()
    return natural_order(gather_partial_from(x, axis, dim), axis, dim)


def zigzag_positions(
    seq_length: int, axis: Axis, device: torch.device | str | None = None
) -> Int[Tensor, " s"]:
    """Return the positions of this rank's tokens in the full sequence.

    Raises:
        ValueError: if the sequence does not divide into two chunks a rank.
    """
    return zigzag_split(torch.arange(seq_length, device=device), axis)


def context_attention(
    q: Float[Tensor, "s B N H"],
    k: Float[Tensor, "s B G H"],
    v: Float[Tensor, "s B G J"],
    axis: Axis,
    attention: Attention,
) -> Float[Tensor, "s B N J"]:
    """Return causal attention over the full sequence, by gathering keys and values.

    Forward all-gathers k and v, backward reduce-scatters their gradients. Each of the two
    local chunks of queries attends to its prefix of the keys. J is the head dimension of v.

    Args:
        q: queries of this rank's tokens, with positions applied.
        k: keys of this rank's tokens, with positions applied.
        v: values of this rank's tokens.
        axis: context ranks; a single rank calls ``attention`` once.
        attention: causal attention on this rank, see ``Attention``.

    Raises:
        ValueError: if this rank's tokens are not two equal chunks, or ``attention`` returns
            another shape.
    """
    if axis.size == 1:
        return _attend(attention, q, k, v)
    chunk = chunk_length(q.shape[0] * axis.size, axis)
    k, v = zigzag_join(k, axis), zigzag_join(v, axis)
    outputs = []
    for local, index in enumerate(own_chunks(axis.rank, axis.size)):
        end = (index + 1) * chunk
        queries = q[local * chunk : (local + 1) * chunk]
        outputs.append(_attend(attention, queries, k[:end], v[:end]))
    return torch.cat(outputs)


def ulysses_attention(
    q: Float[Tensor, "s B N H"],
    k: Float[Tensor, "s B G H"],
    v: Float[Tensor, "s B G J"],
    axis: Axis,
    attention: Attention,
) -> Float[Tensor, "s B N J"]:
    """Return causal attention over the full sequence, by exchanging heads for sequence.

    Four all-to-alls in forward and four in backward. Each rank calls ``attention`` once, on the
    full sequence of its share of the heads. Key/value heads that do not divide over the ranks
    are replicated. J is the head dimension of v.

    Args:
        q: queries of this rank's tokens, with positions applied.
        k: keys of this rank's tokens, with positions applied.
        v: values of this rank's tokens.
        axis: context ranks; a single rank calls ``attention`` once.
        attention: causal attention on this rank, see ``Attention``.

    Raises:
        ValueError: if the ranks do not divide the query heads, or this rank's tokens are not
            two equal chunks, or ``attention`` returns another shape.
    """
    if axis.size == 1:
        return _attend(attention, q, k, v)
    chunk_length(q.shape[0] * axis.size, axis)
    if q.shape[2] % axis.size:
        raise ValueError(
            f"{q.shape[2]} query heads on this rank cannot be exchanged over {axis.size} "
            "context ranks (--context-parallel-size): heads must divide evenly. Use "
            "--cp-comm-type all_gather, which works with any number of heads."
        )
    # Replicate key/value heads until C divides them; autograd sums the copies' gradients.
    copies = axis.size // math.gcd(axis.size, k.shape[2])
    k, v = (x if copies == 1 else x.repeat_interleave(copies, 2) for x in (k, v))
    q, k, v = (heads_to_sequence(x, axis) for x in (q, k, v))
    return sequence_to_heads(_attend(attention, q, k, v), axis)


def _attend(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attention(q, k, v)
    expected = (*q.shape[:3], v.shape[3])
    if out.shape != expected:
        raise ValueError(
            f"attention returned {list(out.shape)} for queries {list(q.shape)}: it must take "
            f"and return [sequence, batch, heads, head dimension], here {list(expected)}"
        )
    return out


def chunk_length(seq_length: int, axis: Axis) -> int:
    """Return the number of tokens in one of 2C chunks.

    Raises:
        ValueError: if the sequence does not divide into two chunks a rank.
    """
    num_chunks = 2 * axis.size
    if seq_length % num_chunks:
        raise ValueError(
            f"--seq-length {seq_length} cannot be cut over --context-parallel-size "
            f"{axis.size}: it must be a multiple of {num_chunks}, two chunks a rank"
        )
    return seq_length // num_chunks


def own_chunks(rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of the two chunks that one of C ranks holds, in order."""
    return rank, 2 * size - 1 - rank


def natural_order(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Reorder chunks 0, 2C-1, 1, 2C-2, ... (as gathered, rank after rank) to 0, 1, 2, ..."""
    first, second = x.unflatten(dim, (axis.size, 2, -1)).unbind(dim + 1)
    return torch.cat([first, second.flip(dim)], dim).flatten(dim, dim + 1)


def zigzag_order(x: Tensor, axis: Axis) -> Tensor:
    """Undo ``natural_order`` along dimension 0."""
    first, second = x.unflatten(0, (2, axis.size, -1)).unbind(0)
    return torch.stack([first, second.flip(0)], 1).flatten(0, 2)


def heads_to_sequence(x: Float[Tensor, "s B N H"], axis: Axis) -> Float[Tensor, "S B n H"]:
    """Exchange this rank's tokens of all heads for all tokens of this rank's heads.

    One all-to-all in forward, one in backward. The result has the full sequence in natural
    order; rank r gets the r-th of C equal blocks of heads.

    Args:
        x: this rank's two chunks; the axis must divide the heads.
        axis: context ranks.
    """
    if axis.size == 1:
        return x
    x = x.unflatten(2, (axis.size, -1)).movedim(2, 0)  # [s, B, N, H] -> [C, s, B, N/C, H]
    gathered = all_to_all(x, axis, [1] * axis.size, [1] * axis.size).flatten(0, 1)
    return natural_order(gathered, axis, 0)


def sequence_to_heads(x: Float[Tensor, "S B n H"], axis: Axis) -> Float[Tensor, "s B N H"]:
    """Undo ``heads_to_sequence``; one all-to-all in forward, one in backward."""
    if axis.size == 1:
        return x
    x = zigzag_order(x, axis).unflatten(0, (axis.size, -1))  # [S, B, n, H] -> [C, s, B, n, H]
    x = all_to_all(x, axis, [1] * axis.size, [1] * axis.size)
    return x.movedim(0, 2).flatten(2, 3)  # [C, s, B, n, H] -> [s, B, C * n, H]
