"""Attention to the keys that an indexer selects for each query, in torch.

Sequences with at most as many keys as are selected use the fused kernels of ``attend``; longer
sequences use a mask of all pairs of query and key. So that engines need no other memory, a
cache stores index keys as the last channels of a token's key, and queries have the indexer's
queries as additional heads; ``pack_queries`` and ``pack_keys`` return this form.

Reference:
    DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556, section 2.1, equations 1 and 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Sizes of an indexer: its heads and channels in packed tensors, and its selected keys."""

    heads: int
    """Heads of the indexer, I."""
    channels: int
    """Channels of an index key, C."""
    topk: int
    """Number of keys that a query attends to."""


def index_scores(
    q: Float[Tensor, "S B I C"], weights: Float[Tensor, "S B I"], k: Float[Tensor, "Z B C"]
) -> Float[Tensor, "B S Z"]:
    """Return the sum of ``weights * relu(q·k)`` over heads, float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    products = torch.einsum("sbic,zbc->bsiz", q.to(wide), k.to(wide)).relu()
    return torch.einsum("bsiz,sbi->bsz", products, weights.to(wide))


def selected_keys(
    scores: Float[Tensor, "B S Z"], seen: Bool[Tensor, "*B S Z"], topk: int
) -> Bool[Tensor, "B 1 S Z"]:
    """Return a mask of the ``topk`` keys of highest score among the keys in ``seen``."""
    scores = scores.masked_fill(~seen, -torch.inf)
    best = scores.topk(min(topk, scores.shape[-1]), -1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    return (chosen & seen).unsqueeze(1)


def attend_to_mask(
    q: Float[Tensor, "S B N H"],
    k: Float[Tensor, "Z B G H"],
    v: Float[Tensor, "Z B G J"],
    mask: Bool[Tensor, "B 1 S Z"],
    dropout_prob: float = 0.0,
) -> Float[Tensor, "S B N J"]:
    """Return values weighted by softmax(q·k / sqrt(H)) over the keys of a mask."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [S, B, N, H] -> [B, N, S, H]
    options: dict[str, Any] = {"dropout_p": dropout_prob}
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    return out.permute(2, 0, 1, 3)


def pack_queries(
    q: Float[Tensor, "S B N H"],
    index_q: Float[Tensor, "S B I C"],
    weights: Float[Tensor, "S B I"],
) -> Float[Tensor, "S B M W"]:
    """Return queries with the indexer's appended as heads, whose last channel is the weight."""
    index = torch.cat([index_q, weights.unsqueeze(-1)], -1)
    return torch.cat([F.pad(q, (0, index.shape[-1])), F.pad(index, (q.shape[-1], 0))], 2)


def pack_keys(
    k: Float[Tensor, "S B 1 H"], index_k: Float[Tensor, "S B C"]
) -> Float[Tensor, "S B 1 W"]:
    """Return keys with the index keys and a channel of zeros appended as channels."""
    return torch.cat([k, F.pad(index_k, (0, 1)).unsqueeze(2)], -1)


def attend_packed(
    q: Float[Tensor, "S B M W"],
    k: Float[Tensor, "Z B 1 W"],
    v: Float[Tensor, "Z B 1 J"],
    selection: Selection,
    seen: Bool[Tensor, "*B S Z"],
    dense: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Float[Tensor, "S B M J"]:
    """Return attention of packed queries to the packed keys that the indexer selects.

    Args:
        q: of ``pack_queries``.
        k: of ``pack_keys``.
        v: values.
        selection: heads and channels of the indexer.
        seen: mask of the keys that each query may attend to.
        dense: attention to all keys, used if there are at most ``topk`` keys; None: always use
            a mask.

    Returns:
        Outputs of the model's heads, then zeros for the indexer's heads.
    """
    width, heads = q.shape[-1] - selection.channels - 1, q.shape[2] - selection.heads
    main_q, main_k = q[:, :, :heads, :width], k[..., :width]
    if dense is not None and k.shape[0] <= selection.topk:
        mixed = dense(main_q, main_k, v)
    else:
        index = q[:, :, heads:, width:]
        scores = index_scores(index[..., :-1], index[..., -1], k[:, :, 0, width:-1])
        mask = selected_keys(scores, seen, selection.topk)
        mixed = attend_to_mask(main_q, main_k, v, mask)
    return F.pad(mixed, (0, 0, 0, selection.heads))
