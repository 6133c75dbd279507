"""Static cache: keys and values of a batch whose rows have equal lengths.

Each layer has one block of memory for the longest text, allocated at first use with the heads,
dtype and device of the layer's keys. A recurrent layer has a state of fixed size instead. The
decode loop of T5 uses this cache; the engine uses ``PagedCache``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_models.config import AttentionBackend
from mcore_models.kernels.attention_backends import attend


class StaticCache:
    """A ``ModelState`` (see ``mcore_models.protocol``) of fixed capacity.

    Attributes:
        capacity: largest number of tokens.
        length: number of cached tokens; ``advance`` adds those of a forward.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._memories: dict[int, _LayerMemory] = {}

    def layer(self, number: int) -> "_StaticLayer":
        """Return the view of a layer, by its global number."""
        return _StaticLayer(self, self._memories.setdefault(number, _LayerMemory()))

    def advance(self, num_tokens: int) -> None:
        """Count the tokens of a forward as cached, after all layers have run."""
        self.length += num_tokens

    @property
    def num_bytes(self) -> int:
        """Allocated memory in bytes."""
        return sum(memory.num_bytes for memory in self._memories.values())


def cache_bytes(
    capacity: int,
    batch: int,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of the keys and values of ``num_layers`` layers on this rank."""
    return 2 * num_layers * capacity * batch * num_kv_heads * head_dim * dtype.itemsize


@dataclass(slots=True)
class _LayerMemory:
    """The keys and values of one layer, or its recurrent state."""

    keys: Tensor | None = None
    values: Tensor | None = None
    has_shared_values: bool = False
    recurrent: tuple[Tensor, ...] | None = None

    @property
    def num_bytes(self) -> int:
        attention = (self.keys, None if self.has_shared_values else self.values)
        return sum(t.nbytes for t in (*attention, *(self.recurrent or ())) if t is not None)


class _StaticLayer:
    """One layer's part of a ``StaticCache``: a ``LayerState``."""

    def __init__(self, cache: StaticCache, memory: _LayerMemory) -> None:
        self.cache, self.held = cache, memory

    def run(
        self,
        mix: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
        *inputs: Shaped[Tensor, "S B ..."],
    ) -> Shaped[Tensor, "S B ..."]:
        """Run a recurrent layer on new tokens and replace its state."""
        y, self.held.recurrent = mix(self.held.recurrent, *inputs)
        return y

    def attend(
        self,
        q: Float[Tensor, "S B N H"],
        k: Float[Tensor, "S B G H"],
        v: Float[Tensor, "S B G J"] | None,
        *,
        value_dim: int = 0,
        window: int = -1,
        backend: AttentionBackend = "auto",
        **scores: Any,
    ) -> Float[Tensor, "S B N J"]:
        """Append keys and values to the cache and attend to all of them.

        Raises:
            ValueError: if the new tokens exceed the capacity.
        """
        begin, capacity = self.cache.length, self.cache.capacity
        end = begin + k.shape[0]
        if end > capacity:
            raise ValueError(f"{end} tokens do not fit into a cache of {capacity}")
        memory = self.held
        if memory.keys is None or memory.values is None:
            memory.keys = k.new_empty(capacity, *k.shape[1:])
            # In latent attention the values are the first channels of the keys.
            memory.has_shared_values = v is None
            memory.values = (
                memory.keys[..., :value_dim]
                if v is None
                else v.new_empty(capacity, *v.shape[1:])
            )
        memory.keys[begin:end] = k
        if v is not None:
            memory.values[begin:end] = v
        keys, values = memory.keys[:end], memory.values[:end]
        return attend(q, keys, values, window=window, backend=backend, **scores)
