"""Attention by the package flash-attn 2, imported only for ``--attention-backend flash``.

``--attention-backend flash`` uses flash-attn if it is installed, otherwise torch's own flash
kernel. flash-attn must be compiled on the host, and was not run by the developers of this
package: tests check calls of its published interface with a stub.

Reference:
    Dao 2023, FlashAttention-2. arXiv:2307.08691.
"""

from importlib import import_module

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_models.kernels import availability
from mcore_parallel.context_parallel.packed_sequences import Documents

_PACKAGE = "flash-attn"
_WIDEST = 256


def is_installed() -> bool:
    """Return whether the package is installed; imports nothing."""
    return availability.is_installed(_PACKAGE)


def misfit(q: Float[Tensor, "S B N H"], v: Float[Tensor, "Z B G J"]) -> str:
    """Return the reason why the kernels do not support these tensors; empty if they do."""
    widths = q.shape[-1], v.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype} is not a 16-bit dtype"
    if widths[1] > widths[0] or widths[0] > _WIDEST or widths[0] % 8:
        return f"heads have {widths[0]} and {widths[1]} channels, not multiples of 8 up to 256"
    return ""


def flash_attention(
    q: Float[Tensor, "S B N H"],
    k: Float[Tensor, "Z B G H"],
    v: Float[Tensor, "Z B G J"],
    *,
    causal: bool,
    scale: float | None,
    window: int,
    softcap: float,
    dropout_prob: float,
    documents: Documents | None = None,
) -> Float[Tensor, "S B N J"]:
    """Return attention by flash-attn 2; arguments as in ``attention_backends.attend``.

    The gradient is reproducible under torch's deterministic algorithms.
    """
    kernels, J = import_module("flash_attn"), v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - J))  # the kernel requires equal widths
    options = {
        "dropout_p": dropout_prob,
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (window, 0) if window >= 0 else (-1, -1),
        "softcap": softcap,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    batch_first = [t.transpose(0, 1) for t in (q, k, v)]  # [S, B, N, H] -> [B, S, N, H]
    if documents is None:
        return kernels.flash_attn_func(*batch_first, **options).transpose(0, 1)[..., :J]
    pieces = documents.flat()
    borders, longest = pieces.cu_seqlens(q.device), pieces.longest
    # Ends of rows are borders between documents: [B, S, N, H] -> [B * S, N, H].
    flat = (t.flatten(0, 1) for t in batch_first)
    lengths = borders, borders, longest, longest
    out = kernels.flash_attn_varlen_func(*flat, *lengths, **options)
    return out.unflatten(0, (q.shape[1], -1)).transpose(0, 1)[..., :J]
