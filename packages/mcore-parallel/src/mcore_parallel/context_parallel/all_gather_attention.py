"""Attention to gathered keys: every context rank all-gathers them, queries stay.

Each of a rank's two chunks sees the keys before it whole and its own ones causally: a
rectangle and a causal square, for which fused kernels are at their fastest, instead of a
mask that is aligned at the lower right. Gathered keys are not kept for backward but gathered
again: S instead of S/C tokens of keys would be most of the memory that a layer saves.

Llama 3, Dubey et al. 2024, arXiv:2407.21783, section 3.3.2.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable, without_autocast
from mcore_parallel.collectives import start_all_gather, start_reduce_scatter, wait
from mcore_parallel.context_parallel.block_attention import (
    Block,
    BlockAttention,
    OnlineSoftmax,
    add_gradients,
)
from mcore_parallel.context_parallel.packed_sequences import Documents, Pieces, check_own_tokens
from mcore_parallel.context_parallel.zigzag import natural_order, own_chunks, zigzag_order
from mcore_parallel.mesh import Axis


def gathered_attention(
    q: Float[Tensor, "s B N H"],
    k: Float[Tensor, "s B G H"],
    v: Float[Tensor, "s B G J"],
    axis: Axis,
    attention: BlockAttention,
    documents: Documents | None = None,
) -> Float[Tensor, "s B N J"]:
    """Attend causally over the whole sequence, keys and values gathered from all ranks.

    Forward and backward each all-gather k and v, backward reduce-scatters their gradients in
    float32 or wider. ``zigzag.context_attention`` does the same for windows and dropout.

    Args:
        q: queries of this rank's two chunks, positions already applied.
        k: keys of this rank's tokens, likewise.
        v: values of this rank's tokens.
        axis: context ranks.
        attention: how a block is computed; ``PLAIN_BLOCKS`` works everywhere.
        documents: of packed rows, whole; None: each row is one.

    Raises:
        ValueError: if this rank's tokens are not two equal chunks, or not those of the
            documents' rows, or if keys and values do not fit the queries.
    """
    check_own_tokens(q, k, v, axis, documents)
    with without_autocast(q.device):
        return _GatheredAttention.apply(q, k, v, axis, attention, documents)


class _GatheredAttention(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        axis: Axis,
        attention: BlockAttention,
        documents: Documents | None,
    ) -> Tensor:
        softmax = OnlineSoftmax.empty(q, v)
        blocks = gathered_blocks(q.shape[0], axis, documents)
        softmax.add(q, *_gather(k, v, axis), blocks, attention)
        out = softmax.rounded(q.dtype)
        ctx.save_for_backward(q, k, v, out, softmax.lse)
        ctx.axis, ctx.attention, ctx.blocks = axis, attention, blocks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        axis, wide = ctx.axis, lse.dtype
        keys, values = _gather(k, v, axis)
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=wide) for x in (q, keys, values))
        add_gradients(
            (grad_q, grad_k, grad_v),
            grad,
            q,
            keys,
            values,
            (out, lse),
            ctx.blocks,
            ctx.attention,
        )
        # Every rank has gradients for all keys, in natural order: in zigzag order each rank's
        # share is one range, which the reduce-scatter leaves there.
        sums = [start_reduce_scatter(zigzag_order(x, axis), axis) for x in (grad_k, grad_v)]
        grad_k, grad_v = (wait(x, axis).to(k.dtype) for x in sums)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def _gather(k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """All-gather keys and values, in natural order."""
    coming = start_all_gather(k, axis), start_all_gather(v, axis)
    keys, values = (natural_order(wait(x, axis), axis, 0) for x in coming)
    return keys, values


def gathered_blocks(length: int, axis: Axis, documents: Documents | None = None) -> list[Block]:
    """List the blocks of one rank: for both its chunks a causal square and a rectangle."""
    chunk, blocks = length // 2, []
    for i, index in enumerate(own_chunks(axis.rank, axis.size)):
        # Queries are counted on this rank, keys over the whole sequence.
        own, begin = slice(i * chunk, (i + 1) * chunk), index * chunk
        square = slice(begin, begin + chunk)
        if documents is None:
            blocks.append(Block(own, square, causal=True))
            if begin:
                blocks.append(Block(own, slice(0, begin), causal=False))
            continue
        queries = range(begin, begin + chunk)
        for row in range(len(documents.rows)):
            here = slice(row, row + 1)
            pieces = documents.within(row, [queries])
            blocks.append(Block(own, square, causal=True, rows=here, pieces=pieces))
            # The one document, if any, that began before this chunk and goes on in it.
            shared = documents.shared(row, queries, range(begin))
            if shared is not None:
                seeing, seen = shared
                blocks.append(
                    Block(
                        slice(i * chunk, i * chunk + len(seeing)),
                        slice(seen.start, seen.stop),
                        causal=False,
                        rows=here,
                        pieces=Pieces([0, len(seen)]),
                    )
                )
    return blocks
