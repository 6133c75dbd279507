"""Blocks of attention on a GPU, for ring attention and attention to gathered keys.

cuDNN is the fastest kernel on Hopper GPUs but plans for every new shape, which takes longer
than a step; it computes the blocks whose shapes never change. Blocks of packed rows, whose
lengths differ from batch to batch, go through torch's flash kernels. The twin is
``mcore_parallel.block_attention.PLAIN_BLOCKS``.
"""

import torch
from torch import Tensor

from mcore_parallel.block_attention import PLAIN_BLOCKS, BlockAttention
from mcore_parallel.documents import Pieces

_aten = torch.ops.aten


def blocks_for(q: Tensor, v: Tensor) -> BlockAttention:
    """Return the fastest blocks for queries and values like these.

    Args:
        q: ``[S, B, N, H]``; fused kernels take 16-bit numbers and heads of up to 128
            channels, a multiple of 8.
        v: ``[Z, B, G, J]``, for fused kernels with as many channels.
    """
    H = q.shape[-1]
    fits = q.dtype in (torch.bfloat16, torch.float16) and H % 8 == 0 and H <= 128
    return FUSED_BLOCKS if q.is_cuda and fits and v.shape[-1] == H else PLAIN_BLOCKS


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, pieces: Pieces | None
) -> tuple[Tensor, Tensor]:
    if pieces is None:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            *_batch_first(q, k, v), None, True, 0.0, causal
        )
        # The kernel keeps a last dimension of 1 in some versions.
        return out.permute(2, 0, 1, 3), lse.view(lse.shape[:3]).permute(2, 0, 1)
    borders, longest = _varlen(q, k, causal, pieces)
    out, lse, *_ = _aten._flash_attention_forward(
        q[:, 0], k[:, 0], v[:, 0], *borders, *longest, 0.0, causal, False
    )
    return out.unsqueeze(1), lse.t().unsqueeze(1)  # [N, S] -> [S, 1, N]


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    pieces: Pieces | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if pieces is None:
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # read only with dropout
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *_batch_first(grad, q, k, v, out),
            lse.permute(1, 2, 0).contiguous().unsqueeze(-1),  # [S, B, N] -> [B, N, S, 1]
            seed,
            seed,
            None,
            None,
            None,
            q.shape[0],
            k.shape[0],
            0.0,
            causal,
        )
        grad_q, grad_k, grad_v = (x.permute(2, 0, 1, 3) for x in grads)
        return grad_q, grad_k, grad_v
    borders, longest = _varlen(q, k, causal, pieces)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # likewise
    grads = _aten._flash_attention_backward(
        grad[:, 0].contiguous(),
        q[:, 0],
        k[:, 0],
        v[:, 0],
        out[:, 0].contiguous(),
        lse[:, 0].t().contiguous(),
        *borders,
        *longest,
        0.0,
        causal,
        seed,
        seed,
    )
    grad_q, grad_k, grad_v = (x.unsqueeze(1) for x in grads)
    return grad_q, grad_k, grad_v


def _batch_first(*tensors: Tensor) -> list[Tensor]:
    return [x.permute(1, 2, 0, 3) for x in tensors]  # [S, B, N, H] -> [B, N, S, H]


def _varlen(
    q: Tensor, k: Tensor, causal: bool, pieces: Pieces
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Return borders of queries and keys, and the longest piece of either."""
    if causal:
        borders = pieces.cu_seqlens(q.device)
        return (borders, borders), (pieces.longest, pieces.longest)
    own = Pieces([0, q.shape[0]]).cu_seqlens(q.device)
    return (own, pieces.cu_seqlens(q.device)), (q.shape[0], k.shape[0])


FUSED_BLOCKS = BlockAttention(_forward, _backward)
"""Blocks by cuDNN and flash kernels, 16-bit, on a GPU."""
