"""Rounds keys and values of the cache to fp8 (e4m3), with one scale for each of them per layer.

An fp8 cache halves the memory, and the time to read it while decoding. A scale of 1 suffices
for models whose keys and values stay below 448, as is usual. A new key is rounded before its
first use, so a text does not depend on how its prompt was cut into chunks.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from mcore_ckpt.mapping.low_bits import LARGEST
from mcore_infer.config import CacheDtype
from mcore_infer.engine.limits import Fp8Cache, Scales
from mcore_infer.kv_cache import StaticCache
from mcore_models.config import TransformerConfig
from mcore_models.protocol import LayerState

log = logging.getLogger(__name__)


_LATENT = (
    "--kv-cache-dtype fp8 stores keys and values, and latent attention stores one vector for "
    "both"
)


def check_fp8_cache(config: TransformerConfig) -> None:
    """Raise ValueError for models whose cache does not hold keys and values."""
    if config.multi_latent_attention:
        raise ValueError(f"{_LATENT}: set --kv-cache-dtype model.")


def chosen_cache(
    kv_cache_dtype: CacheDtype, config: TransformerConfig, kv_scales: Mapping[int, Scales]
) -> Fp8Cache | None:
    """Choose the format of a model's cache: fp8 with its scales, or None for the model's dtype.

    Raises:
        ValueError: if fp8 is requested and the model has latent attention.
    """
    if kv_cache_dtype == "fp8":
        check_fp8_cache(config)
    elif kv_cache_dtype == "model" or not kv_scales:
        return None
    elif config.multi_latent_attention:
        log.warning("the checkpoint's scales of an fp8 cache are not used: %s.", _LATENT)
        return None
    return Fp8Cache(kv_scales)


def to_codes(x: Float[Tensor, "..."], scale: float) -> UInt8[Tensor, "..."]:
    """Divide numbers by ``scale`` and return them as bytes of e4m3, clamped to its range."""
    limit = LARGEST["e4m3"]
    scaled = x if scale == 1.0 else x.float() / scale  # fewer passes over x
    return scaled.clamp(-limit, limit).to(torch.float8_e4m3fn).view(torch.uint8)


def from_codes(
    codes: UInt8[Tensor, "..."], scale: float, dtype: torch.dtype
) -> Float[Tensor, "..."]:
    """Decode bytes of e4m3, and multiply the numbers by ``scale``."""
    numbers = codes.view(torch.float8_e4m3fn)
    return numbers.to(dtype) if scale == 1.0 else (numbers.float() * scale).to(dtype)


@contextmanager
def rounded_cache(model: nn.Module, cache: Fp8Cache) -> Iterator[None]:
    """Within the context, forwards without a state attend to keys and values rounded to fp8."""

    def add(
        module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        del module
        state = _RoundedCache(arguments[0].shape[1], cache)
        return arguments[:2], options | {"state": state}  # tokens, positions

    hook = model.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


class _RoundedCache(StaticCache):
    """A static cache that rounds keys and values before it stores them."""

    def __init__(self, capacity: int, cache: Fp8Cache) -> None:
        super().__init__(capacity)
        self._codes = cache

    def layer(self, number: int) -> Any:
        return _RoundedLayer(super().layer(number), self._codes.of(number))


class _RoundedLayer:
    def __init__(self, inner: LayerState, scales: Scales) -> None:
        self._inner, self._scales = inner, scales

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        k, v = (
            from_codes(to_codes(x, scale), scale, x.dtype)
            for x, scale in zip((k, v), self._scales, strict=True)
        )
        return self._inner.attend(q, k, v, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
