"""Keys and values of the tokens that a model has seen, in one block of memory a layer.

All rows of a batch have the same length; memory for the longest text is taken at once, at
the first use of a layer, whose tensors give number of heads, dtype and device.
"""

import torch
from jaxtyping import Float
from torch import Tensor


class StaticCache:
    """A ``KVCache`` (see ``mcore_models.protocol``) of fixed capacity.

    Attributes:
        capacity: tokens that fit.
        length: tokens held; ``advance`` moves it when a forward is over.
    """

    def __init__(self, capacity: int) -> None:
        """Take no memory yet.

        Args:
            capacity: tokens that fit.
        """
        self.capacity = capacity
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(
        self, layer: int, k: Float[Tensor, "S B G H"], v: Float[Tensor, "S B G H"]
    ) -> tuple[Float[Tensor, "Z B G H"], Float[Tensor, "Z B G H"]]:
        """Keep a layer's new keys and values behind the old ones, return views of all.

        Raises:
            ValueError: if they do not fit.
        """
        end = self.length + k.shape[0]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit into a cache of {self.capacity}")
        if layer not in self._layers:
            shape = (self.capacity, *k.shape[1:])
            self._layers[layer] = (k.new_empty(shape), v.new_empty(shape))
        keys, values = self._layers[layer]
        keys[self.length : end] = k
        values[self.length : end] = v
        return keys[:end], values[:end]

    def advance(self, num_tokens: int) -> None:
        """Say that a forward over so many new tokens is over, in all layers."""
        self.length += num_tokens

    @property
    def num_bytes(self) -> int:
        """Memory taken so far."""
        return sum(t.nbytes for pair in self._layers.values() for t in pair)


def cache_bytes(
    capacity: int,
    batch: int,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> int:
    """Memory of a full cache of this rank: keys and values of all its layers and heads."""
    return 2 * num_layers * capacity * batch * num_kv_heads * head_dim * dtype.itemsize
