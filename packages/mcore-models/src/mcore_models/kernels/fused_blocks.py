"""Blocks of attention on a GPU, for ring attention and attention to gathered keys.

Dense blocks use the kernel of ``--attention-backend``, or the fastest kernel. For a new shape
cuDNN plans longer than a step takes, and flash-attn-4 compiles. So blocks of packed rows, whose
lengths change with every batch, use torch's flash kernels; so do heads that are wider than
cuDNN's blocks were tested with. The reference is
``mcore_parallel.context_parallel.block_attention.PLAIN_BLOCKS``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mcore_models.config import AttentionBackend
from mcore_models.kernels import flash4_attention as flash4
from mcore_parallel.context_parallel.block_attention import PLAIN_BLOCKS, BlockAttention
from mcore_parallel.context_parallel.packed_sequences import DocumentPieces

_aten = torch.ops.aten
WIDEST, _WIDEST_CUDNN = 256, 128
"""Channels of a head that fused blocks, and cuDNN's, were tested with on a GPU."""


def blocks_for(q: Tensor, v: Tensor, backend: AttentionBackend = "auto") -> BlockAttention:
    """Return the block kernels for these queries and values.

    Args:
        q: ``[S, B, N, H]``; fused kernels require 16-bit numbers and heads of up to 256
            channels, a multiple of 8.
        v: ``[Z, B, G, J]``; fused kernels require as many channels.
        backend: as in ``attention_backends.attend``.
    """
    H = q.shape[-1]
    has_format = q.dtype in (torch.bfloat16, torch.float16)
    fits = q.is_cuda and has_format and has_fused_width(H) and v.shape[-1] == H
    tries_flash4 = backend == "flash4" or (backend == "auto" and flash4.is_faster(q, q))
    refusal = flash4.refusal(q, v, 0.0) if tries_flash4 else ""
    if backend == "flash4" and refusal:
        raise ValueError(f"--attention-backend flash4 cannot be used: {refusal}. Use auto.")
    if backend in ("fused", "flash") and not fits:
        raise ValueError(
            f"--attention-backend {backend} does not support {q.dtype} and heads of {H} "
            f"channels on {q.device.type} over context ranks: use auto."
        )
    if tries_flash4 and not refusal:
        return FLASH4_BLOCKS
    if backend in ("unfused", "local") or not fits:
        return PLAIN_BLOCKS
    return FLASH_BLOCKS if backend == "flash" or H > _WIDEST_CUDNN else CUDNN_BLOCKS


def has_fused_width(channels: int) -> bool:
    """Return whether fused blocks support heads of this width."""
    return channels in range(8, WIDEST + 1, 8)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *_batch_first(q, k, v), None, True, 0.0, causal
    )
    # Some versions of the kernel return a last dimension of 1.
    return out.permute(2, 0, 1, 3), lse.view(lse.shape[:3]).permute(2, 0, 1)


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # read with dropout only
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


def _batch_first(*tensors: Tensor) -> list[Tensor]:
    return [x.permute(1, 2, 0, 3) for x in tensors]  # [S, B, N, H] -> [B, N, S, H]


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, pieces: DocumentPieces | None
) -> tuple[Tensor, Tensor]:
    options = 0.0, causal, False
    if pieces is None:
        batch_first = (x.transpose(0, 1) for x in (q, k, v))  # [S, B, N, H] -> [B, S, N, H]
        out, lse, *_ = _aten._flash_attention_forward(
            *batch_first, None, None, q.shape[0], k.shape[0], *options
        )
        return out.transpose(0, 1), lse.permute(2, 0, 1)  # [B, N, S] -> [S, B, N]
    lengths = _lengths(q, k, causal, pieces)
    out, lse, *_ = _aten._flash_attention_forward(q[:, 0], k[:, 0], v[:, 0], *lengths, *options)
    return out.unsqueeze(1), lse.t().unsqueeze(1)  # [N, S] -> [S, 1, N]


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    pieces: DocumentPieces | None,
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # read with dropout only
    options = 0.0, causal, seed, seed
    if pieces is None:
        grads = _aten._flash_attention_backward(
            *(x.transpose(0, 1).contiguous() for x in (grad, q, k, v, out)),
            lse.permute(1, 2, 0).contiguous(),
            None,
            None,
            q.shape[0],
            k.shape[0],
            *options,
        )
        grad_q, grad_k, grad_v = (x.transpose(0, 1) for x in grads)
        return grad_q, grad_k, grad_v
    grads = _aten._flash_attention_backward(
        *(x[:, 0].contiguous() for x in (grad, q, k, v, out)),
        lse[:, 0].t().contiguous(),
        *_lengths(q, k, causal, pieces),
        *options,
    )
    grad_q, grad_k, grad_v = (x.unsqueeze(1) for x in grads)
    return grad_q, grad_k, grad_v


def _lengths(
    q: Tensor, k: Tensor, causal: bool, pieces: DocumentPieces
) -> tuple[Tensor, Tensor, int, int]:
    """Return cumulative lengths of queries and keys, and the longest piece of either."""
    borders = pieces.cu_seqlens(q.device)
    if causal:
        return borders, borders, pieces.longest, pieces.longest
    return DocumentPieces([0, q.shape[0]]).cu_seqlens(q.device), borders, q.shape[0], k.shape[0]


Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _dense_by(dense_forward: Forward, dense_backward: Backward) -> BlockAttention:
    """Return blocks with the given kernels if dense, and torch's flash kernels if packed."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, pieces: DocumentPieces | None
    ) -> tuple[Tensor, Tensor]:
        if pieces is None:
            return dense_forward(q, k, v, causal)
        return _flash_forward(q, k, v, causal, pieces)

    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        pieces: DocumentPieces | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if pieces is None:
            return dense_backward(grad, q, k, v, out, lse, causal)
        return _flash_backward(grad, q, k, v, out, lse, causal, pieces)

    return BlockAttention(forward, backward)


FLASH_BLOCKS = BlockAttention(_flash_forward, _flash_backward)
"""Torch's own flash kernels, dense and packed."""
CUDNN_BLOCKS = _dense_by(_cudnn_forward, _cudnn_backward)
FLASH4_BLOCKS = _dense_by(flash4.forward_block, flash4.backward_block)
"""Blocks for tensors that ``flash4_attention.refusal`` accepts."""
