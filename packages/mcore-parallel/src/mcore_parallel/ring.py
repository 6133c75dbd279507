"""Ring attention: keys and values travel round the context ranks, queries stay.

Each rank holds two chunks of the sequence in zigzag order (``context_parallel``), so that
every step of the ring is the same amount of work for all, and each message travels while
the block before it is computed. Blocks are merged by their log-sum-exp. In backward keys
and values travel again, and their gradients with them, home after a full turn.

Liu et al. 2023, Ring Attention, arXiv:2310.01889; merging: Milakov and Gimelshein 2018,
arXiv:1805.02867; the backward of a block from the statistics of the whole softmax: Dao et
al. 2022, FlashAttention, arXiv:2205.14135, algorithm 4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.collectives import start_shift, wait
from mcore_parallel.context_parallel import chunk_length
from mcore_parallel.mesh import Axis


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """Attention of some queries to some keys on one rank: a backend of the ring.

    Shapes: q ``[Sq, B, N, H]``, k ``[Sk, B, G, H]``, v ``[Sk, B, G, J]``, outputs
    ``[Sq, B, N, J]``, log-sum-exp of the scaled scores ``[Sq, B, N]``. Where ``causal`` is
    true Sq and Sk are equal; where it is false every query sees every key.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    """``(q, k, v, causal) -> (output, log-sum-exp)`` of this block alone."""
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]
    ]
    """``(grad, q, k, v, output, log-sum-exp, causal) -> (grad q, grad k, grad v)``, given the
    output and log-sum-exp over all blocks, not over this one."""


def ring_attention(
    q: Float[Tensor, "s B N H"],
    k: Float[Tensor, "s B G H"],
    v: Float[Tensor, "s B G J"],
    axis: Axis,
    attention: BlockAttention,
) -> Float[Tensor, "s B N J"]:
    """Attend causally over the whole sequence, keys and values passed from rank to rank.

    C - 1 messages of k and of v in forward; in backward as many again, and C of their
    gradients, in float32 or wider. Sums are kept in float32 or wider.

    Args:
        q: queries of this rank's two chunks, positions already applied.
        k: keys of this rank's tokens, likewise.
        v: values of this rank's tokens.
        axis: context ranks, C of them.
        attention: how a block is computed; ``PLAIN_BLOCKS`` works everywhere.

    Raises:
        ValueError: if this rank's tokens are not two equal chunks.
    """
    chunk_length(q.shape[0] * axis.size, axis)
    return _RingAttention.apply(q, k, v, axis, attention)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, attention: BlockAttention
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
        held = k, v
        for step in range(axis.size):
            coming = _pass_on(held, axis, step)
            rows, columns, causal = _visible(q.shape[0], axis, step)
            block, block_lse = attention.forward(
                q[rows], held[0][columns], held[1][columns], causal
            )
            block = _spread(block, rows, q.shape[0], 0.0)
            block_lse = _spread(block_lse, rows, q.shape[0], -torch.inf)
            total = torch.logaddexp(lse, block_lse)
            kept, added = (lse - total).exp(), (block_lse - total).exp()
            out = out * kept.unsqueeze(-1) + block * added.unsqueeze(-1)
            lse = total
            held = wait(coming[0]), wait(coming[1])
        # A forward that returns the alias which an idle .to gives loses all its gradients under
        # torch.compile, without a word (seen on 2.11).
        out = out if q.dtype == wide else out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.axis, ctx.attention = axis, attention
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        axis, wide = ctx.axis, lse.dtype
        grad_q = torch.zeros_like(q, dtype=wide)
        # The gradients of the keys and values held, of all ranks that had them so far.
        grads = [torch.zeros_like(x, dtype=wide) for x in (k, v)]
        held = k, v
        for step in range(axis.size):
            coming = _pass_on(held, axis, step)
            rows, columns, causal = _visible(q.shape[0], axis, step)
            block_q, *block_kv = ctx.attention.backward(
                grad[rows],
                q[rows],
                held[0][columns],
                held[1][columns],
                out[rows],
                lse[rows],
                causal,
            )
            grad_q = grad_q + _spread(block_q, rows, q.shape[0], 0.0)
            grads = [
                start_shift(wait(total) + _spread(block, columns, k.shape[0], 0.0), axis)
                for total, block in zip(grads, block_kv, strict=True)
            ]
            held = wait(coming[0]), wait(coming[1])
        grad_k, grad_v = (wait(x).to(k.dtype) for x in grads)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None


def _pass_on(held: tuple[Tensor, Tensor], axis: Axis, step: int) -> tuple[Tensor, Tensor]:
    """Begin to send keys and values to the next rank, unless all ranks have had them."""
    if step == axis.size - 1:
        return held
    return start_shift(held[0], axis), start_shift(held[1], axis)


def _visible(length: int, axis: Axis, step: int) -> tuple[slice, slice, bool]:
    """Return which own queries see which of the keys held at a step, and whether causally.

    The keys are those of rank j, step ranks back: chunks j and 2C-1-j. Own chunks are r and
    2C-1-r. With j < r both see all of chunk j and nothing of 2C-1-j; with j > r chunk r sees
    nothing and 2C-1-r sees both whole.
    """
    everything, half = slice(0, length), length // 2
    source = (axis.rank - step) % axis.size
    if source == axis.rank:
        return everything, everything, True
    if source < axis.rank:
        return everything, slice(0, half), False
    return slice(half, length), everything, False


def _spread(part: Tensor, where: slice, length: int, value: float) -> Tensor:
    """Put rows at their place among ``length``; the others are ``value``."""
    padding = (0, 0) * (part.dim() - 1) + (where.start, length - where.stop)
    return F.pad(part, padding, value=value)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    probs = (scores - lse.unsqueeze(-1)).exp()
    out = torch.einsum("bgrst,tbgj->sbgrj", probs, v.to(probs.dtype))
    return out.flatten(2, 3), lse.permute(3, 0, 1, 2).flatten(2, 3)  # [B, G, r, S] -> [S, B, N]


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    groups, scale = k.shape[2], q.shape[-1] ** -0.5
    grad, out = grad.to(lse.dtype), out.to(lse.dtype)
    delta = (grad * out).sum(-1)
    # [S, B, N] -> [B, G, r, S, 1]
    lse, delta = (
        x.unflatten(2, (groups, -1)).permute(1, 2, 3, 0).unsqueeze(-1) for x in (lse, delta)
    )
    probs = (_scores(q, k, causal) - lse).exp()
    grad = grad.unflatten(2, (groups, -1))
    grad_v = torch.einsum("bgrst,sbgrj->tbgj", probs, grad)
    grad_probs = torch.einsum("sbgrj,tbgj->bgrst", grad, v.to(probs.dtype))
    grad_scores = probs * (grad_probs - delta) * scale
    grad_q = torch.einsum("bgrst,tbgh->sbgrh", grad_scores, k.to(probs.dtype))
    queries = q.to(probs.dtype).unflatten(2, (groups, -1))
    grad_k = torch.einsum("bgrst,sbgrh->tbgh", grad_scores, queries)
    return grad_q.flatten(2, 3), grad_k, grad_v


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return scaled scores ``[B, G, r, Sq, Sk]``, r query heads for each key head."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("sbgrh,tbgh->bgrst", q, k.to(wide)) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~seen, -torch.inf)


PLAIN_BLOCKS = BlockAttention(_plain_forward, _plain_backward)
"""Blocks in plain torch with whole score matrices: for the CPU, and the twin of faster ones."""
