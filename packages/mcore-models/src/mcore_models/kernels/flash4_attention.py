"""Attention by flash-attn-4, the fastest measured on Hopper: an extra, imported when used.

On an H200, causal, 32 heads of 128 channels over 8192 tokens: 636 TFLOP/s forward and 550
backward; cuDNN has 564 and 487. The package compiles its kernels in the first call for a kind
of shape, in some seconds each. Tensors keep the sequence dimension first: the kernels write
results through strided views.

``forward_block`` and ``backward_block`` are the same kernels for blocks of context parallelism.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_models.kernels import availability
from mcore_models.kernels.availability import without_compiler_noise
from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.optional_kernels import (
    Sample,
    kernel_failure,
    optional_kernel,
    sine_leaf,
)

_PACKAGE = "flash-attn-4"
EXTRA = 'flash-attn-4 is not installed: pip install "mcore-models[flash4]"'
_SIZES = (64, 128)
_SHORTEST = 1024
"""Number of queries below which the launch costs more than the faster kernel saves."""


def is_installed() -> bool:
    """Return whether the package is installed; imports nothing."""
    return availability.is_installed(_PACKAGE)


def refusal(q: Tensor, v: Tensor, dropout_prob: float) -> str:
    """Return the reason why these tensors need another backend; empty if they do not.

    The first call without another reason runs the kernels' trial.
    """
    why_not = misfit(q, v, dropout_prob)
    return why_not or kernel_failure(flash4_attention, q.device, *kind(q, v))


def misfit(q: Tensor, v: Tensor, dropout_prob: float) -> str:
    """Return the reason why the kernels do not support tensors or device; runs no trial."""
    particular = (
        (
            q.shape[-1] not in _SIZES or v.shape[-1] != q.shape[-1],
            f"heads have {q.shape[-1]} and {v.shape[-1]} channels, not 64 or 128",
        ),
        (dropout_prob > 0.0, "it does not support --attention-dropout"),
    )
    return availability.refusal(q, particular, _PACKAGE, EXTRA)


def kind(q: Tensor, v: Tensor) -> tuple[torch.dtype, int, int]:
    """Return the key of compiled kernels: dtype, channels, queries per key/value head."""
    return q.dtype, q.shape[-1], q.shape[-2] // v.shape[-2]


def is_faster(q: Tensor, k: Tensor) -> bool:
    """Return whether flash-attn-4 was faster than cuDNN for this number of tokens."""
    return min(q.shape[0], k.shape[0]) >= _SHORTEST


def _plain(
    q: Float[Tensor, "S B N H"],
    k: Float[Tensor, "Z B G H"],
    v: Float[Tensor, "Z B G H"],
    *,
    causal: bool,
    scale: float | None,
    window: int,
) -> Float[Tensor, "S B N H"]:
    # In float32 by plain operations: torch's kernels may refuse deterministic algorithms.
    assert causal
    assert scale is None
    assert window < 0
    dtype, size, length = q.dtype, q.shape[-1], q.shape[0]
    q, k, v = (x.permute(1, 2, 0, 3).float() for x in (q, k, v))  # [S, B, N, H] -> [B, N, S, H]
    scores = q @ k.transpose(-1, -2) * size**-0.5
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return out.permute(2, 0, 1, 3).to(dtype)


def _samples(
    device: torch.device, dtype: torch.dtype, size: int, ratio: int
) -> Iterator[Sample]:
    heads = (ratio, 1, 1)
    qkv = (sine_leaf(256, 1, n, size, device=device, dtype=dtype) for n in heads)
    yield Sample(*qkv, causal=True, scale=None, window=-1)


@optional_kernel(
    "attention by flash-attn-4",
    reference=_plain,
    kind=kind,
    samples=_samples,
    packages=(_PACKAGE, "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi"),
)
def flash4_attention(
    q: Float[Tensor, "S B N H"],
    k: Float[Tensor, "Z B G H"],
    v: Float[Tensor, "Z B G H"],
    *,
    causal: bool,
    scale: float | None,
    window: int,
) -> Float[Tensor, "S B N H"]:
    """Return attention by flash-attn-4; arguments as in ``attention_backends.attend``.

    The gradient is reproducible under torch's deterministic algorithms.
    """
    return _Flash4.apply(q, k, v, causal, scale, None if window < 0 else window)


class _Flash4(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        out, lse = _forward(q, k, v, causal, scale, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = (causal, scale, window)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "B N S"]]:
    out = q.new_empty(q.shape)
    with without_compiler_noise():
        _, lse, *_ = load()._flash_attn_fwd(
            *(t.transpose(0, 1) for t in (q, k, v)),  # [S, B, N, H] -> [B, S, N, H]
            softmax_scale=scale,
            causal=causal,
            window_size_left=window,
            window_size_right=None if window is None else 0,
            return_lse=True,
            out=out.transpose(0, 1),
        )
    return out, lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    with without_compiler_noise():
        load()._flash_attn_bwd(
            *(t.transpose(0, 1) for t in (q, k, v, out, grad)),
            lse,
            scale,
            causal,
            window_size_left=window,
            window_size_right=None if window is None else 0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dq=dq.transpose(0, 1),
            dk=dk.transpose(0, 1),
            dv=dv.transpose(0, 1),
        )
    return dq, dk, dv


def load() -> Any:
    """Return the package's interface; the first call imports it, which takes seconds."""
    return import_module("flash_attn.cute.interface")


def forward_block(
    q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "S B N"]]:
    """Return output and log-sum-exps of a block of attention; see ``BlockAttention``."""
    out, lse = _forward(q, k, v, causal)
    return out, lse.permute(2, 0, 1)  # [B, N, S] -> [S, B, N]


def backward_block(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``forward_block`` with respect to q, k and v."""
    lse = lse.permute(1, 2, 0).contiguous()  # [S, B, N] -> [B, N, S]
    return _backward(grad.to(q.dtype), q, k, v, out.to(q.dtype), lse, causal)
