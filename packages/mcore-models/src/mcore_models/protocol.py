"""What others give to a model or need from it, as types.

Training, generation and verification know models as ``LanguageModel`` and nothing of their
layers. A model runs with any ``ModelState``; no class need be inherited for one.
"""

from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from mcore_models.config import AttentionBackend, TransformerConfig
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.mesh import Axis
from mcore_parallel.pipeline_parallel.stages import Stage


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


class LanguageModel(nn.Module, ABC):
    """A model that scores tokens, whole or one pipeline stage of it.

    Attributes:
        config: shape and numerics of the layers.
        vocab_size: true number of tokens.
        stage: which layers are here, and whether embedding and loss are.
        tp: ranks that share a head's rows.
    """

    config: TransformerConfig
    vocab_size: int
    stage: Stage
    tp: Axis

    @abstractmethod
    def forward(
        self,
        x: Shaped[Tensor, "..."],
        positions: Int[Tensor, "*B S"] | None = None,
        state: ModelState | None = None,
        documents: Documents | None = None,
    ) -> tuple[Float[Tensor, "s B D"], Float[Tensor, ""]]:
        """Run this stage's layers.

        Args:
            x: token ids ``[B, S/cp]`` on the first stage, else what the stage before
                returned.
            positions: of the tokens, ``[S/cp]`` or ``[B, S/cp]``; None: counted.
            state: what the layers remember of earlier tokens; extended by these.
            documents: packed in the rows; none sees another.

        Returns:
            The hidden state, and this stage's auxiliary losses, coefficients included.
        """

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "s B D"]) -> Float[Tensor, "S B v"]:
        """Score the vocabulary: this rank's slice of it, padding included.

        Args:
            hidden: of ``forward`` on the last stage.
        """

    @abstractmethod
    def token_losses(
        self, hidden: Float[Tensor, "s B D"], labels: Int[Tensor, "B S"]
    ) -> Float[Tensor, "B S"]:
        """Cross-entropy of every token, float32 or wider, with any gradient.

        Args:
            hidden: of ``forward`` on the last stage.
            labels: the right token at every place.
        """

    @abstractmethod
    def loss(
        self,
        hidden: Float[Tensor, "s B D"],
        labels: Int[Tensor, "B S"],
        weights: Float[Tensor, "B S"],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B S"]]:
        """Weighted sum of token losses; the sum must be a root of backward.

        Args:
            hidden: of ``forward`` on the last stage.
            labels: the right token at every place.
            weights: of the token losses: mask over the global count of valid tokens.

        Returns:
            The sum, and every token's loss without gradient.
        """
