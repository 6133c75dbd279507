"""Attention to gathered keys: every context rank all-gathers keys and values.

The queries of each of a rank's two chunks attend to all earlier keys, a rectangle, and to the
chunk's own keys, a causal square. Fused kernels are fastest on these two shapes. Backward
gathers keys and values again: saving S instead of S/C tokens of them would dominate the memory
of a layer.

Llama 3, Dubey et al. 2024, arXiv:2407.21783, section 3.3.2.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable, without_autocast
from mcore_parallel.collectives import start_all_gather, start_reduce_scatter, wait
from mcore_parallel.context_parallel.block_attention import (
    AttentionBlock,
    BlockAttention,
    OnlineSoftmax,
    add_gradients,
)
from mcore_parallel.context_parallel.packed_sequences import (
    DocumentPieces,
    Documents,
    check_own_tokens,
)
from mcore_parallel.context_parallel.zigzag import natural_order, own_chunks, zigzag_order
from mcore_parallel.mesh import Axis


def all_gather_attention(
    q: Float[Tensor, "s B N H"],
    k: Float[Tensor, "s B G H"],
    v: Float[Tensor, "s B G J"],
    axis: Axis,
    attention: BlockAttention,
    documents: Documents | None = None,
) -> Float[Tensor, "s B N J"]:
    """Return causal attention over the full sequence, with keys and values of all ranks.

    Forward and backward each all-gather k and v; backward reduce-scatters their gradients in
    float32 or wider. ``zigzag.context_attention`` also supports windows and dropout.

    Args:
        q: queries of this rank's two chunks, with positions applied.
        k: keys of this rank's tokens, with positions applied.
        v: values of this rank's tokens.
        axis: context ranks.
        attention: backend of a block; ``PLAIN_BLOCKS`` runs on any device.
        documents: documents of the full packed rows; None: each row is one document.

    Raises:
        ValueError: if this rank's tokens are not two equal chunks, or do not match the
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
        # Every rank has gradients of all keys, in natural order. In zigzag order the keys of a
        # rank are one contiguous range, as the reduce-scatter requires.
        sums = [start_reduce_scatter(zigzag_order(x, axis), axis) for x in (grad_k, grad_v)]
        grad_k, grad_v = (wait(x, axis).to(k.dtype) for x in sums)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def _gather(k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """All-gather keys and values; return them in natural order."""
    gathering = start_all_gather(k, axis), start_all_gather(v, axis)
    keys, values = (natural_order(wait(x, axis), axis, 0) for x in gathering)
    return keys, values


def gathered_blocks(
    length: int, axis: Axis, documents: Documents | None = None
) -> list[AttentionBlock]:
    """List the blocks of one rank: a causal square and a rectangle for each of two chunks."""
    chunk, blocks = length // 2, []
    for i, index in enumerate(own_chunks(axis.rank, axis.size)):
        # Queries are indexed on this rank, keys over the full sequence.
        own_queries, begin = slice(i * chunk, (i + 1) * chunk), index * chunk
        square = slice(begin, begin + chunk)
        if documents is None:
            blocks.append(AttentionBlock(own_queries, square, causal=True))
            if begin:
                blocks.append(AttentionBlock(own_queries, slice(0, begin), causal=False))
            continue
        tokens = range(begin, begin + chunk)
        for row in range(len(documents.rows)):
            rows = slice(row, row + 1)
            pieces = documents.within(row, [tokens])
            blocks.append(
                AttentionBlock(own_queries, square, causal=True, rows=rows, pieces=pieces)
            )
            # The document, if any, that starts before this chunk and continues in it.
            shared = documents.shared(row, tokens, range(begin))
            if shared is not None:
                queries, keys = shared
                blocks.append(
                    AttentionBlock(
                        slice(i * chunk, i * chunk + len(queries)),
                        slice(keys.start, keys.stop),
                        causal=False,
                        rows=rows,
                        pieces=DocumentPieces([0, len(keys)]),
                    )
                )
    return blocks
