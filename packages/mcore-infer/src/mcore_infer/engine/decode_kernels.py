"""Chooses the attention kernel of a decoding step by device, dtype, sizes and options.

The modules of the kernels import Triton, and are therefore imported only for tensors on a GPU.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_infer.engine.limits import Scales
from mcore_parallel.optional_kernels import OptionalKernel, works

_RULES = {"scale", "chunk", "softcap", "sinks"}
"""Arguments of ``attend`` that the decoding kernel supports."""
_MANY_PROGRAMS, _MANY_PROGRAMS_OF_CODES = 256, 512
"""Fewest requests times groups of heads for which ``decode_many`` was measured to be faster."""


def decode_kernel(
    num_rows: int,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    scores: Mapping[str, Any],
    kv_scales: Scales | None,
    page_tokens: int,
) -> Callable[..., Tensor] | None:
    """Return the kernel that writes new keys and attends to pages; None: no kernel fits.

    Args:
        num_rows: requests of the step.
        q: queries; ``[R, ..., N, H]``.
        k: new keys; ``[R, ..., G, H]``.
        v: new values; None: latent attention.
        scores: options of ``attend``.
        kv_scales: scales of an fp8 cache; None: the cache has the model's dtype.
        page_tokens: tokens in a page.
    """
    if v is None or v.shape[-1] != q.shape[-1] or scores.keys() - _RULES:
        return None
    if not q.is_cuda or q.dtype == torch.float64:
        return None
    if kv_scales is not None and q.shape[-1] % 4:  # the kernel reads four codes at once
        return None
    from mcore_infer.engine.kernels.paged_attention import DECODE_KERNEL, paged_decode

    sizes = q.dtype, q.shape[-1], q.shape[-2] // k.shape[-2], kv_scales is not None
    kind = *sizes, tuple(sorted(scores))
    is_for_many = takes_many(num_rows * k.shape[-2], page_tokens, *kind)
    if is_for_many and works(DECODE_MANY_KERNEL, q.device, *kind):
        from mcore_infer.engine.kernels.paged_attention_many import decode_many

        return decode_many
    return paged_decode if works(DECODE_KERNEL, q.device, *kind) else None


def latent_kernel(
    q: Tensor, values: Tensor, rules: Mapping[str, Any]
) -> Callable[..., Tensor] | None:
    """Return the kernel of latent attention; None: no kernel supports the inputs.

    Args:
        q: queries.
        values: the channels of the cached keys that are values.
        rules: ``window``, ``kv_scales`` and other options of ``attend``.
    """
    is_plain = rules.keys() == {"window", "kv_scales"} and rules["window"] < 0
    if not q.is_cuda or q.dtype == torch.float64 or not is_plain:
        return None
    from mcore_infer.engine.kernels.latent_attention import LATENT_KERNEL, latent_decode

    kind = q.dtype, *q.shape[-2:], values.shape[-1]
    if not works(LATENT_KERNEL, q.device, *kind):
        return None
    return partial(latent_decode, value_dim=values.shape[-1])


def takes_many(
    num_programs: int,
    page_tokens: int,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    in_fp8: bool,
    rules: tuple[str, ...],
) -> bool:
    """Whether ``decode_many`` supports the sizes and was measured to be faster for them.

    The arguments after ``page_tokens`` are those of ``DECODE_KERNEL``.
    """
    is_plain = dtype == torch.bfloat16 and not set(rules) - {"scale"}
    fits_tiles = page_tokens % 32 == 0 and group <= 8
    min_programs = _MANY_PROGRAMS_OF_CODES if in_fp8 else _MANY_PROGRAMS
    return (
        num_programs >= min_programs and is_plain and fits_tiles and head_dim in (64, 96, 128)
    )


def _trial_of_many(*kind: Any) -> list[tuple[Tensor, Tensor]]:
    # Imported within the trial, because some builds of Triton have no Gluon.
    from mcore_infer.engine.kernels.paged_attention import decode_trial
    from mcore_infer.engine.kernels.paged_attention_many import decode_many

    return decode_trial(*kind, decode=decode_many)


DECODE_MANY_KERNEL = OptionalKernel(
    "the decoding kernel for many requests", ("triton",), _trial_of_many
)
"""The kind is that of ``DECODE_KERNEL``; the only supported option is ``scale``."""
