"""Ring attention: context ranks pass keys and values around a ring and keep their queries.

Each rank holds two chunks of the sequence in zigzag order (``zigzag``), so every rank has equal
work in every step of the ring. While a step computes its blocks, it sends the keys and values
for the next step. Backward passes keys and values around again, together with their gradients,
which arrive on the rank of their keys after a full turn.

A step sends all its tensors as one message: the blocks of a step differ between ranks, so a
compiler could order several messages differently on each rank, and they would not match.

Liu et al. 2023, Ring Attention, arXiv:2310.01889.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable, without_autocast
from mcore_parallel.collectives import start_shift, wait
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
    own_ranges,
)
from mcore_parallel.context_parallel.zigzag import own_chunks, ulysses_attention
from mcore_parallel.mesh import Axis


def ring_attention(
    q: Float[Tensor, "s B N H"],
    k: Float[Tensor, "s B G H"],
    v: Float[Tensor, "s B G J"],
    axis: Axis,
    attention: BlockAttention,
    documents: Documents | None = None,
) -> Float[Tensor, "s B N J"]:
    """Return causal attention over the full sequence, passing keys around a ring.

    Forward sends C - 1 messages with k and v. Backward sends C + 1 messages: C - 1 contain k
    and v, C contain their gradients. Gradients and sums are float32 or wider.

    Args:
        q: queries of this rank's two chunks, with positions applied.
        k: keys of this rank's tokens, with positions applied.
        v: values of this rank's tokens.
        axis: the C context ranks.
        attention: backend of a block; ``PLAIN_BLOCKS`` runs on any device.
        documents: documents of the full packed rows; None: each row is one document.

    Raises:
        ValueError: if this rank's tokens are not two equal chunks, or do not match the
            documents' rows, or if keys and values do not fit the queries.
    """
    check_own_tokens(q, k, v, axis, documents)
    with without_autocast(q.device):
        return _RingAttention.apply(q, k, v, axis, attention, documents)


def hierarchical_attention(
    q: Float[Tensor, "s B N H"],
    k: Float[Tensor, "s B G H"],
    v: Float[Tensor, "s B G J"],
    levels: tuple[Axis, Axis],
    attention: BlockAttention,
    documents: Documents | None = None,
) -> Float[Tensor, "s B N J"]:
    """Return causal attention by head exchange in groups and a ring of groups.

    Four all-to-alls inside a group, as in ``ulysses_attention``, around ``ring_attention`` with
    a rank's share of the heads. The chunks of a group of A consecutive ranks are adjacent: of
    2AR chunks they are two runs of A, that is two of 2R larger chunks in zigzag order over the
    R groups of the ring.

    Args:
        q: queries of this rank's two chunks, with positions applied.
        k: keys of this rank's tokens, with positions applied.
        v: values of this rank's tokens.
        levels: axis of the head exchange and axis of the ring: ``cp_exchange`` and ``cp_ring``
            of a context.
        attention: backend of a block.
        documents: documents of the full packed rows; None: each row is one document.

    Raises:
        ValueError: if the first level does not divide the query heads, or for the reasons of
            ``ring_attention``.

    Reference:
        Fang and Zhao 2024, USP, arXiv:2405.07719, section 3.
    """
    exchange, ring = levels

    def on_group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, ring, attention, documents)

    return ulysses_attention(q, k, v, exchange, on_group)


class _RingAttention(OnceDifferentiable):
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
        kv: Sequence[Tensor] = (k, v)  # keys and values of rank r - step
        for step in range(axis.size):
            # The message for the next step overlaps with the blocks of this step. The last step
            # sends nothing.
            outgoing = kv if step < axis.size - 1 else ()
            incoming = _start_pass(outgoing, axis)
            softmax.add(
                q, kv[0], kv[1], ring_blocks(q.shape[0], axis, step, documents), attention
            )
            kv = _received(incoming, outgoing, axis)
        out = softmax.rounded(q.dtype)
        ctx.save_for_backward(q, k, v, out, softmax.lse)
        ctx.axis, ctx.attention, ctx.documents = axis, attention, documents
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        axis, wide = ctx.axis, lse.dtype
        grad_q = torch.zeros_like(q, dtype=wide)
        # Gradients of the keys and values of the previous step, summed over the ranks so far.
        totals: list[Tensor] = []
        kv: Sequence[Tensor] = (k, v)
        for step in range(axis.size):
            # One message: the sums for the previous step's keys, which the next rank holds now,
            # and this step's keys and values, which the next rank needs in the next step.
            outgoing = [*totals, *(kv if step < axis.size - 1 else ())]
            incoming = _start_pass(outgoing, axis)
            blocks = ring_blocks(q.shape[0], axis, step, ctx.documents)
            local = [torch.zeros_like(x, dtype=wide) for x in (k, v)]
            add_gradients(
                (grad_q, local[0], local[1]),
                grad,
                q,
                kv[0],
                kv[1],
                (out, lse),
                blocks,
                ctx.attention,
            )
            # The message's first two tensors (from step 1 on) are sums for the keys that this
            # rank holds in this step, its last two the keys and values of the next step.
            received = _received(incoming, outgoing, axis)
            totals = [a + b for a, b in zip(received, local, strict=False)] if step else local
            kv = received[-2:]
        # The keys of the last step belong to the next rank: one more pass moves their sums
        # there.
        sums = _received(_start_pass(totals, axis), totals, axis)
        grad_k, grad_v = (x.to(k.dtype) for x in sums)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def _start_pass(tensors: Sequence[Tensor], axis: Axis) -> Tensor | None:
    """Launch a send of tensors to the next rank as one message of bytes.

    Tensors with wider dtypes must come first, so that each tensor is aligned in the message.
    """
    if not tensors:
        return None
    flat = [x.contiguous().view(-1).view(torch.uint8) for x in tensors]  # [...] -> bytes
    return start_shift(torch.cat(flat), axis)


def _received(message: Tensor | None, sent: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Wait for the previous rank's message; return its tensors, shaped like those sent."""
    if message is None:
        return []
    parts = wait(message, axis).split([x.numel() * x.element_size() for x in sent])
    return [part.view(x.dtype).view(x.shape) for part, x in zip(parts, sent, strict=True)]


def ring_blocks(
    length: int, axis: Axis, step: int, documents: Documents | None = None
) -> list[AttentionBlock]:
    """List the blocks that rank r computes at one step of the ring.

    The queries are chunks r and 2C-1-r. The keys come from rank j = r - step (modulo C): chunks
    j and 2C-1-j. If j < r, both query chunks attend to all of chunk j and to nothing of 2C-1-j.
    If j > r, query chunk r attends to nothing, and 2C-1-r to all of both key chunks.
    """
    source = (axis.rank - step) % axis.size
    if documents is not None:
        return _packed_blocks(length, axis, source, documents)
    everything, half = slice(0, length), length // 2
    if source == axis.rank:
        return [AttentionBlock(everything, everything, causal=True)]
    if source < axis.rank:
        return [AttentionBlock(everything, slice(0, half), causal=False)]
    return [AttentionBlock(slice(half, length), everything, causal=False)]


def _packed_blocks(
    length: int, axis: Axis, source: int, documents: Documents
) -> list[AttentionBlock]:
    rows = range(len(documents.rows))
    if source == axis.rank:
        chunks, everything = own_ranges(documents.length, axis), slice(0, length)
        return [
            AttentionBlock(
                everything,
                everything,
                causal=True,
                rows=slice(row, row + 1),
                pieces=documents.within(row, chunks),
            )
            for row in rows
        ]
    # Keys of another rank: a query chunk and an earlier key chunk share at most one document,
    # which gives one rectangle. A shift converts positions in the sequence to indices into the
    # two chunks of the query rank and of the key rank.
    chunk, blocks = length // 2, []
    for row in rows:
        for i, query_chunk in enumerate(own_chunks(axis.rank, axis.size)):
            for j, key_chunk in enumerate(own_chunks(source, axis.size)):
                if key_chunk > query_chunk:
                    continue
                shared = documents.shared(
                    row,
                    range(query_chunk * chunk, (query_chunk + 1) * chunk),
                    range(key_chunk * chunk, (key_chunk + 1) * chunk),
                )
                if shared is not None:
                    blocks.append(
                        AttentionBlock(
                            _shifted(shared[0], (i - query_chunk) * chunk),
                            _shifted(shared[1], (j - key_chunk) * chunk),
                            causal=False,
                            rows=slice(row, row + 1),
                            pieces=DocumentPieces([0, len(shared[1])]),
                        )
                    )
    return blocks


def _shifted(tokens: range, by: int) -> slice:
    return slice(tokens.start + by, tokens.stop + by)
