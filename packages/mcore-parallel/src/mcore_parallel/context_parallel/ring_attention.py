"""Ring attention: context ranks pass keys and values round a ring and keep their queries.

Each rank holds two chunks of the sequence in zigzag order (``zigzag``), so that every step of
the ring is the same amount of work for all. A step sends the keys and values of the next one
while its own blocks are computed. Backward passes keys and values round again, together with
their gradients, which are back on the rank of their keys after a full turn.

A step sends all its tensors as one message: which blocks a rank computes depends on the rank,
so a compiler may order several messages differently on each rank, and they would not match.

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
    Block,
    BlockAttention,
    OnlineSoftmax,
    add_gradients,
)
from mcore_parallel.context_parallel.packed_sequences import (
    Documents,
    Pieces,
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
    """Attend causally over the whole sequence, keys and values passed from rank to rank.

    C - 1 messages of k and v in forward. In backward C + 1: k and v are in C - 1 of them, and
    their gradients, in float32 or wider, in C. Sums are kept in float32 or wider.

    Args:
        q: queries of this rank's two chunks, positions already applied.
        k: keys of this rank's tokens, likewise.
        v: values of this rank's tokens.
        axis: context ranks, C of them.
        attention: how a block is computed; ``PLAIN_BLOCKS`` works everywhere.
        documents: of packed rows, whole; None: each row is one.

    Raises:
        ValueError: if this rank's tokens are not two equal chunks, or not those of the
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
    """Attend causally over the whole sequence: heads exchanged in groups, a ring of groups.

    Four all-to-alls in a group, as in ``ulysses_attention``, around ``ring_attention`` with a
    group's share of the heads. A group of A neighbours holds, in order, two of 2R chunks, R
    groups in the ring, since their chunks of 2AR lie side by side: zigzag order again.

    Args:
        q: queries of this rank's two chunks, positions already applied.
        k: keys of this rank's tokens, likewise.
        v: values of this rank's tokens.
        levels: ranks that exchange heads, and those of the ring: ``cp_exchange`` and
            ``cp_ring`` of a context.
        attention: how a block is computed.
        documents: of packed rows, whole; None: each row is one.

    Raises:
        ValueError: if the first level does not divide the query heads, or as
            ``ring_attention`` does.

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
        held: Sequence[Tensor] = (k, v)  # of rank r - step
        for step in range(axis.size):
            # The next step's keys and values are on their way while this step's blocks are
            # computed. After the last step nothing is sent.
            leaving = held if step < axis.size - 1 else ()
            coming = _pass_on(leaving, axis)
            softmax.add(
                q, held[0], held[1], ring_blocks(q.shape[0], axis, step, documents), attention
            )
            held = _received(coming, leaving, axis)
        out = softmax.rounded(q.dtype)
        ctx.save_for_backward(q, k, v, out, softmax.lse)
        ctx.axis, ctx.attention, ctx.documents = axis, attention, documents
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        axis, wide = ctx.axis, lse.dtype
        grad_q = torch.zeros_like(q, dtype=wide)
        # Gradients of the keys and values now held, summed over the ranks that had them.
        totals: list[Tensor] = []
        held: Sequence[Tensor] = (k, v)
        for step in range(axis.size):
            # Sent together: the sums for the keys of the step before, which the next rank holds
            # now, and this step's keys and values, which it needs next.
            leaving = [*totals, *(held if step < axis.size - 1 else ())]
            coming = _pass_on(leaving, axis)
            blocks = ring_blocks(q.shape[0], axis, step, ctx.documents)
            own = [torch.zeros_like(x, dtype=wide) for x in (k, v)]
            add_gradients(
                (grad_q, own[0], own[1]),
                grad,
                q,
                held[0],
                held[1],
                (out, lse),
                blocks,
                ctx.attention,
            )
            # The message's first two tensors are sums for the keys held here in this step; at
            # step 0 there are none. Its last two are the keys and values of the next step.
            received = _received(coming, leaving, axis)
            totals = [a + b for a, b in zip(received, own, strict=False)] if step else own
            held = received[-2:]
        # The keys held last are those of the next rank: one more shift brings each sum home.
        grad_k, grad_v = (
            x.to(k.dtype) for x in _received(_pass_on(totals, axis), totals, axis)
        )
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def _pass_on(tensors: Sequence[Tensor], axis: Axis) -> Tensor | None:
    """Start to send tensors to the next rank as one; the widest dtype first, for alignment."""
    if not tensors:
        return None
    flat = [x.contiguous().view(-1).view(torch.uint8) for x in tensors]  # [...] -> bytes
    return start_shift(torch.cat(flat), axis)


def _received(message: Tensor | None, sent: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Wait for the previous rank's tensors, which have the shapes of those sent here."""
    if message is None:
        return []
    parts = wait(message, axis).split([x.numel() * x.element_size() for x in sent])
    return [part.view(x.dtype).view(x.shape) for part, x in zip(parts, sent, strict=True)]


def ring_blocks(
    length: int, axis: Axis, step: int, documents: Documents | None = None
) -> list[Block]:
    """List the blocks of one rank at one step of the ring.

    The keys are those of rank j, ``step`` ranks back: chunks j and 2C-1-j. Own chunks are r
    and 2C-1-r. With j < r both see all of chunk j and nothing of 2C-1-j; with j > r chunk r
    sees nothing and 2C-1-r sees both whole.
    """
    source = (axis.rank - step) % axis.size
    if documents is not None:
        return _packed_blocks(length, axis, source, documents)
    everything, half = slice(0, length), length // 2
    if source == axis.rank:
        return [Block(everything, everything, causal=True)]
    if source < axis.rank:
        return [Block(everything, slice(0, half), causal=False)]
    return [Block(slice(half, length), everything, causal=False)]


def _packed_blocks(length: int, axis: Axis, source: int, documents: Documents) -> list[Block]:
    rows = range(len(documents.rows))
    if source == axis.rank:
        own, everything = own_ranges(documents.length, axis), slice(0, length)
        return [
            Block(
                everything,
                everything,
                causal=True,
                rows=slice(row, row + 1),
                pieces=documents.within(row, own),
            )
            for row in rows
        ]
    # Keys of another rank: a pair of an own chunk and an earlier one of its chunks shares at
    # most one document, which gives one rectangle. Places in the sequence become places in
    # the two ranks' own chunks by a shift.
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
                        Block(
                            _shifted(shared[0], (i - query_chunk) * chunk),
                            _shifted(shared[1], (j - key_chunk) * chunk),
                            causal=False,
                            rows=slice(row, row + 1),
                            pieces=Pieces([0, len(shared[1])]),
                        )
                    )
    return blocks


def _shifted(tokens: range, by: int) -> slice:
    return slice(tokens.start + by, tokens.stop + by)
