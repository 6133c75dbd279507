"""Tracking of the largest attention score of each head over a step.

Fused attention does not return scores. They are recomputed for blocks of queries, without
gradient, at about the cost of attention's first GEMM.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.context_parallel.zigzag import zigzag_join, zigzag_positions
from mcore_parallel.mesh import SINGLE, Axis

PIECE_ELEMENTS = 1 << 25
"""Scores in memory at one time."""


class ScoreTracker:
    """The largest scores of an attention layer's heads on this rank since the last ``take``."""

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self.largest: Tensor | None = None

    def note(self, scores: Float[Tensor, " N"]) -> None:
        """Store the maximum of stored and new scores."""
        if self.largest is None:
            self.largest = torch.zeros_like(scores)
        torch.maximum(self.largest, scores, out=self.largest)

    def take(self) -> Float[Tensor, " N"]:
        """Return the largest scores, 0 or more, and reset them."""
        if self.largest is None:
            raise RuntimeError(
                "no largest scores: run a micro-batch in training after track_scores()."
            )
        scores = self.largest.clone()
        self.largest.zero_()
        return scores


@torch.no_grad()
def largest_scores(
    q: Float[Tensor, "s B N H"],
    k: Float[Tensor, "s B G H"],
    *,
    cp: Axis = SINGLE,
    scale: float = 0.0,
    window: int = -1,
    chunk: int = 0,
    documents: Documents | None = None,
    piece_elements: int = PIECE_ELEMENTS,
) -> Float[Tensor, " N"]:
    """Return each head's largest score over the keys of its queries, float32 or wider.

    All-gathers the keys over ``cp``.

    Args:
        q: rotated queries of this context rank's tokens.
        k: rotated keys of the same tokens.
        cp: ranks that share the sequence in zigzag order.
        scale: factor on scores; 0: 1 / sqrt(H).
        window: keys before a query's own that the query attends to; -1: all.
        chunk: tokens of a chunk; queries attend to keys of their chunk. 0: no chunks.
        documents: documents of complete rows, which do not attend to each other.
        piece_elements: approximate number of scores in memory at one time.
    """
    k = zigzag_join(k, cp) if cp.size > 1 else k
    q = q * (scale or q.shape[-1] ** -0.5)  # unscaled scores may overflow float16
    num_keys, (num_queries, B, N, _) = k.shape[0], q.shape
    G = k.shape[2]
    positions = zigzag_positions(num_keys, cp, q.device)
    first = _first_seen(positions, window, chunk, documents)  # [B or 1, S]
    keys, key = k.permute(1, 2, 3, 0), torch.arange(num_keys, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    largest = torch.full((N,), -torch.inf, dtype=wide, device=q.device)
    step = max(1, piece_elements // (B * N * num_keys))
    for begin in range(0, num_queries, step):
        part = slice(begin, begin + step)
        # [s, B, N, H] -> [B, G, N/G * s, H], so that heads of a group share one GEMM
        rows = q[part].unflatten(2, (G, -1)).permute(1, 2, 3, 0, 4)
        # Without context ranks, queries are in order and attend to no key after the block.
        end = min(begin + step, num_keys) if cp.size == 1 else num_keys
        scores = (rows.flatten(2, 3) @ keys[..., :end]).unflatten(2, rows.shape[2:4])
        hidden = (key[:end] < first[:, part, None]) | (key[:end] > positions[part, None])
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
        largest = torch.maximum(largest, scores.amax((0, 3, 4)).flatten().to(wide))
    return largest


def _first_seen(
    positions: Tensor, window: int, chunk: int, documents: Documents | None
) -> Tensor:
    """Return the first key that each query attends to, ``[B or 1, S]``."""
    first = torch.zeros_like(positions)
    if window >= 0:
        first = torch.maximum(first, positions - window)
    if chunk and documents is not None:
        documents = documents.cut(chunk)
    elif chunk:
        first = torch.maximum(first, positions // chunk * chunk)
    if documents is None:
        return first.unsqueeze(0)
    begins = torch.stack([pieces.first_seen(positions.device) for pieces in documents.rows])
    return torch.maximum(first, begins[:, positions])
