"""What others hand to a model or need from it, as types.

A model runs with any object that has these methods; nothing is inherited.
"""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class KVCache(Protocol):
    """Keys and values of tokens that a model has seen, layer by layer.

    During one forward ``length`` stays what it was before; it grows by the new tokens when
    the forward is over, by its owner's doing (on the last layer's ``append``, or outside).
    """

    @property
    def length(self) -> int:
        """Tokens held before this forward: the position of the first new one."""
        ...

    def append(
        self, layer: int, k: Float[Tensor, "S B G H"], v: Float[Tensor, "S B G H"]
    ) -> tuple[Float[Tensor, "Z B G H"], Float[Tensor, "Z B G H"]]:
        """Keep a layer's new keys and values, return all of them, oldest first.

        Args:
            layer: global number of the layer.
            k: keys of the new tokens, rotated; this rank's heads.
            v: values likewise.
        """
        ...
