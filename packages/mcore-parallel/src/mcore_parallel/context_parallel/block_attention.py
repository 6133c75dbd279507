"""Attention in blocks of the score matrix, merged by their log-sum-exp.

The score matrix of causal attention consists of causal squares, in which each query attends to
the keys up to its own position, and rectangles, in which every query attends to every key. A
fused kernel computes either at full speed and returns the log-sum-exp of its scores; sums over
blocks are float32 or wider. Ring attention and attention to gathered keys are lists of blocks.

Merging: Milakov and Gimelshein 2018, arXiv:1805.02867; the backward of a block from the
statistics of the whole softmax: Dao et al. 2022, FlashAttention, arXiv:2205.14135,
algorithm 4.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.context_parallel.packed_sequences import DocumentPieces


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """A causal square or a rectangle of the score matrix of one batch."""

    queries: slice
    """Range of the queries on this rank."""
    keys: slice
    """Range of the keys that this rank has now."""
    causal: bool
    """Whether the block is a causal square; else every query attends to every key."""
    rows: slice = field(default_factory=lambda: slice(None))
    """Rows of the batch: all, or one packed row."""
    pieces: DocumentPieces | None = None
    """Documents inside a causal square of a packed row. For a rectangle of a packed row all
    keys as one piece, which selects a kernel for variable lengths."""


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """A backend that computes one block of attention on one rank.

    Shapes: q ``[Sq, B, N, H]``, k ``[Sk, B, G, H]``, v ``[Sk, B, G, J]``, outputs
    ``[Sq, B, N, J]``, log-sum-exp of the scaled scores ``[Sq, B, N]``. ``causal`` and
    ``pieces`` are fields of the ``AttentionBlock``; with pieces B is 1.
    """

    forward: Callable[
        [Tensor, Tensor, Tensor, bool, DocumentPieces | None], tuple[Tensor, Tensor]
    ]
    """``(q, k, v, causal, pieces) -> (output, log-sum-exp)`` of this block only."""
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, DocumentPieces | None],
        tuple[Tensor, Tensor, Tensor],
    ]
    """``(grad, q, k, v, output, log-sum-exp, causal, pieces) -> (grad q, grad k, grad v)`` of
    this block, given the output and log-sum-exp over all blocks."""


@dataclass(frozen=True, slots=True)
class OnlineSoftmax:
    """Running output and log-sum-exp over blocks, float32 or wider, updated in place."""

    out: Float[Tensor, "S B N J"]
    lse: Float[Tensor, "S B N"]

    @classmethod
    def empty(cls, q: Float[Tensor, "S B N H"], v: Float[Tensor, "Z B G J"]) -> "OnlineSoftmax":
        """Allocate uninitialised; the first blocks must be causal squares over all queries."""
        wide = torch.promote_types(q.dtype, torch.float32)
        return cls(
            q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=wide),
            q.new_empty(q.shape[:-1], dtype=wide),
        )

    def rounded(self, dtype: torch.dtype) -> Float[Tensor, "S B N J"]:
        """Return the output in a dtype, after all blocks have been added."""
        # A .to() without effect returns an alias. An autograd forward that returns this alias
        # silently loses all gradients under torch.compile (seen on torch 2.11).
        return self.out if self.out.dtype == dtype else self.out.to(dtype)

    def add(
        self,
        q: Float[Tensor, "S B N H"],
        k: Float[Tensor, "Z B G H"],
        v: Float[Tensor, "Z B G J"],
        blocks: Iterable[AttentionBlock],
        attention: BlockAttention,
    ) -> None:
        """Compute blocks and merge them into the output; causal squares overwrite."""
        for block in blocks:
            keys = block.keys, block.rows
            queries = block.queries, block.rows
            part, part_lse = attention.forward(
                q[queries], k[keys], v[keys], block.causal, block.pieces
            )
            out, lse = self.out[queries], self.lse[queries]
            if block.causal:
                out.copy_(part)
                lse.copy_(part_lse)
                continue
            # out = exp(lse - total) out + exp(part_lse - total) part
            total = torch.logaddexp(lse, part_lse)
            out.mul_((lse - total).exp_().unsqueeze(-1))
            out.addcmul_(part.to(out.dtype), (part_lse - total).exp_().unsqueeze(-1))
            lse.copy_(total)


def add_gradients(
    grads: tuple[Tensor, Tensor, Tensor],
    grad: Float[Tensor, "S B N J"],
    q: Float[Tensor, "S B N H"],
    k: Float[Tensor, "Z B G H"],
    v: Float[Tensor, "Z B G J"],
    softmax: tuple[Float[Tensor, "S B N J"], Float[Tensor, "S B N"]],
    blocks: Iterable[AttentionBlock],
    attention: BlockAttention,
) -> None:
    """Compute the gradients of q, k and v from some blocks, and add them to ``grads``.

    Args:
        grads: gradients of q, k and v, float32 or wider; changed in place.
        grad: gradient of the output.
        q: queries on this rank.
        k: keys that this rank has now.
        v: values that this rank has now.
        softmax: output and log-sum-exp over all blocks.
        blocks: blocks of these queries and keys.
        attention: backend that computed the blocks in forward.
    """
    grad_q, grad_k, grad_v = grads
    out, lse = softmax
    for block in blocks:
        keys = block.keys, block.rows
        queries = block.queries, block.rows
        parts = attention.backward(
            grad[queries],
            q[queries],
            k[keys],
            v[keys],
            out[queries],
            lse[queries],
            block.causal,
            block.pieces,
        )
        grad_q[queries].add_(parts[0])
        grad_k[keys].add_(parts[1])
        grad_v[keys].add_(parts[2])


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, pieces: DocumentPieces | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, pieces)
    lse = scores.logsumexp(-1)
    probs = (scores - lse.unsqueeze(-1)).exp()
    out = torch.einsum("bgrst,tbgj->sbgrj", probs, v.to(probs.dtype))
    return out.flatten(2, 3), lse.permute(3, 0, 1, 2).flatten(2, 3)  # [B, G, r, S] -> [S, B, N]


def _plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    pieces: DocumentPieces | None,
) -> tuple[Tensor, Tensor, Tensor]:
    groups, scale = k.shape[2], q.shape[-1] ** -0.5
    grad, out = grad.to(lse.dtype), out.to(lse.dtype)
    # With p the probabilities and dO the gradient of the output (FlashAttention, algorithm 4):
    #   delta = rowsum(dO * O), dV = p^T dO, dS = p * (dO V^T - delta), dQ = dS K, dK = dS^T Q.
    delta = (grad * out).sum(-1)
    # [S, B, N] -> [B, G, r, S, 1]
    lse, delta = (
        x.unflatten(2, (groups, -1)).permute(1, 2, 3, 0).unsqueeze(-1) for x in (lse, delta)
    )
    probs = (_scores(q, k, causal, pieces) - lse).exp()
    grad = grad.unflatten(2, (groups, -1))
    grad_v = torch.einsum("bgrst,sbgrj->tbgj", probs, grad)
    grad_probs = torch.einsum("sbgrj,tbgj->bgrst", grad, v.to(probs.dtype))
    grad_scores = probs * (grad_probs - delta) * scale
    grad_q = torch.einsum("bgrst,tbgh->sbgrh", grad_scores, k.to(probs.dtype))
    queries = q.to(probs.dtype).unflatten(2, (groups, -1))
    grad_k = torch.einsum("bgrst,sbgrh->tbgh", grad_scores, queries)
    return grad_q.flatten(2, 3), grad_k, grad_v


def _scores(q: Tensor, k: Tensor, causal: bool, pieces: DocumentPieces | None) -> Tensor:
    """Return scaled scores ``[B, G, r, Sq, Sk]``, r query heads for each key head."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("sbgrh,tbgh->bgrst", q, k.to(wide)) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if pieces is not None:
        keys = torch.arange(k.shape[0], device=q.device)
        mask = mask & (keys >= pieces.first_seen(q.device).unsqueeze(1))
    return scores.masked_fill(~mask, -torch.inf)


PLAIN_BLOCKS = BlockAttention(_plain_forward, _plain_backward)
"""Blocks in plain torch with full score matrices: for the CPU, and as reference of kernels."""
