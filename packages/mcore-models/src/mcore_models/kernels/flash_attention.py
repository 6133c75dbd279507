"""Attention by flash-attn 2, which is built on the host: never imported unless named.

``--attention-backend flash`` takes it where it is installed, and torch's own flash kernel
elsewhere. It was not run by this package's developers: its published interface is what tests
hold, by a stub.

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
    """Whether the package is there; imports nothing."""
    return availability.is_installed(_PACKAGE)


def misfit(q: Float[Tensor, "S B N H"], v: Float[Tensor, "Z B G J"]) -> str:
    """Return why the kernels do not take these tensors; empty: they do."""
    widths = q.shape[-1], v.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype} is not a format of 16 bits"
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
    """Attend by flash-attn 2; the arguments are those of ``attention_backends.attend``.

    The gradient is the same in every run if torch's deterministic algorithms are on.
    """
    kernels, J = import_module("flash_attn"), v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - J))  # the kernel has one width for all
    rules = {
        "dropout_p": dropout_prob,
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (window, 0) if window >= 0 else (-1, -1),
        "softcap": softcap,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    batch_first = [t.transpose(0, 1) for t in (q, k, v)]  # [S, B, N, H] -> [B, S, N, H]
    if documents is None:
        return kernels.flash_attn_func(*batch_first, **rules).transpose(0, 1)[..., :J]
    pieces = documents.flat()
    borders, longest = pieces.cu_seqlens(q.device), pieces.longest
    # The rows' ends are borders too: [B, S, N, H] -> [B * S, N, H].
    flat = (t.flatten(0, 1) for t in batch_first)
    lengths = borders, borders, longest, longest
    out = kernels.flash_attn_varlen_func(*flat, *lengths, **rules)
    return out.unflatten(0, (q.shape[1], -1)).transpose(0, 1)[..., :J]
