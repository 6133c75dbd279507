"""What others hand to a model or need from it, as types.

A model runs with any object that has these methods; nothing is inherited.
"""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from mcore_models.config import AttentionBackend


@runtime_checkable
class LayerState(Protocol):
    """What one attention layer remembers of earlier tokens, however it is stored."""

    def attend(
        self,
        q: Float[Tensor, "S B N H"],
        k: Float[Tensor, "S B G H"],
        v: Float[Tensor, "S B G H"],
        *,
        window: int = -1,
        backend: AttentionBackend = "auto",
    ) -> Float[Tensor, "S B N H"]:
        """Remember the new tokens, and let them attend to themselves and all earlier ones.

        Args:
            q: queries of the new tokens, rotated; this rank's heads.
            k: their keys, rotated.
            v: their values.
            window: earlier keys that a query sees besides its own; -1: all.
            backend: kernels to use, see ``attend``.
        """
        ...


@runtime_checkable
class ModelState(Protocol):
    """What a model remembers of earlier tokens, layer by layer; made by an engine.

    During one forward ``length`` stays what it was before; it grows by the new tokens when
    the forward is over, by its owner's doing (in the last layer, or outside).
    """

    @property
    def length(self) -> int:
        """Tokens held before this forward: the position of the first new one."""
        ...

    def layer(self, number: int) -> LayerState:
        """Return the view of a layer, by its global number."""
        ...
