"""What others give to a model or need from it, as types.

Training and verification use models as ``TrainableModel``, independent of their layers:
named tensors of a batch in, a payload from stage to stage, named losses out. Generation
needs a ``LanguageModel``. A model runs with any ``ModelState``; no class need
be inherited for one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from mcore_models.building.initialization import initialize_
from mcore_models.config import AttentionBackend, TransformerConfig
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.pipeline_parallel.runner import Payload, PayloadShape
from mcore_parallel.pipeline_parallel.stages import Stage
from mcore_parallel.sharding import Shard

LM_LOSS = "lm loss"
"""Name of the main loss of every model, as in Megatron's log."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One named tensor of a batch."""

    length: str = "seq_length"
    """Option that says how long its rows are; empty: one number a row."""
    is_cut: bool = True
    """Whether context ranks each keep their part of a row; else all keep it whole."""
    is_derived: bool = False
    """Whether ``TrainableModel.prepare`` adds it, so that no dataset has it."""


TOKENS, LABELS, LOSS_MASK = "tokens", "labels", "loss_mask"
"""Entries of a batch of plain text, all ``[B, S]``: ids, next ids, 1 where they count."""
TEXT: Mapping[str, Entry] = MappingProxyType({n: Entry() for n in (TOKENS, LABELS, LOSS_MASK)})
"""What a decoder-only model reads."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch as a rank sees it: its context rank's part of each sequence."""

    entries: Mapping[str, Shaped[Tensor, "B ..."]]
    """By name, batch first; on the meta device what no stage of this rank reads."""
    positions: Int[Tensor, "B Q"] | None = None
    """Places of the tokens where rows count them themselves; None: from 0 to S-1."""
    documents: Documents | None = field(default=None)
    """Documents that the whole rows pack and that do not see each other."""

    def __getitem__(self, name: str) -> Shaped[Tensor, "B ..."]:
        """Return an entry."""
        return self.entries[name]


@runtime_checkable
class LayerState(Protocol):
    """What one attention layer remembers of earlier tokens, however it is stored."""

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
        """Remember the new tokens, and let them attend to themselves and all earlier ones.

        Args:
            q: queries of the new tokens, rotated; this rank's heads.
            k: their keys, rotated.
            v: their values; None (latent attention): the first J channels of ``k``.
            value_dim: J where ``v`` is None.
            window: earlier keys that a query sees besides its own; -1: all.
            backend: kernels to use, see ``attend``.
            scores: ``scale``, ``chunk``, ``softcap`` and ``sinks`` where a model has them, for
                ``attend``.
        """


@runtime_checkable
class RecurrentState(Protocol):
    """What one recurrent layer remembers: tensors that each forward replaces."""

    def run(
        self,
        mix: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
        *inputs: Shaped[Tensor, "S B ..."],
    ) -> Shaped[Tensor, "S B ..."]:
        """Mix the new tokens with what is remembered, and remember what is behind them.

        Args:
            mix: takes the state before some texts' tokens (a tuple of tensors ``[B, ...]``;
                None: their first) and their inputs, and returns its output and the state
                behind. May be called for parts of the batch.
            inputs: of all tokens.

        Returns:
            The outputs of all tokens.
        """


@runtime_checkable
class ModelState(Protocol):
    """What a model remembers of earlier tokens, layer by layer; made by an engine.

    During one forward ``length`` stays what it was before; it grows by the new tokens when
    the forward is over, by its owner's doing (in the last layer, or outside).
    """

    @property
    def length(self) -> int:
        """Tokens held before this forward: the position of the first new one."""

    def layer(self, number: int) -> LayerState:
        """Return the view of a layer, by its global number.

        That of a recurrent layer is a ``RecurrentState`` too.
        """


class TrainableModel(nn.Module, ABC):
    """A model that trains, whole or one pipeline stage of it.

    A stage runs on a micro-batch and on what the stage before sent, and sends on; the last
    one turns what it has into losses, each with its own mask. A loss is the sum of its token
    losses over the number of those that count, over all micro-batches, data and context
    ranks, times its coefficient; what is trained is the sum of all.

    Attributes:
        config: shape and numerics of the layers.
        vocab_size: true number of tokens.
        stage: which layers are here, and whether embedding and loss are.
        tp: ranks that share a head's rows.
        pp: ranks that hold the stages.
        dtype: of the activations that stages send on.
        entries: of a batch; the first of each ``length`` says how long the rows are.
        loss_coefficients: by name of the loss, the main one first; the same on all stages.
    """

    config: TransformerConfig
    vocab_size: int
    stage: Stage
    tp: Axis
    pp: Axis = SINGLE
    dtype: torch.dtype = torch.float32
    entries: Mapping[str, Entry] = TEXT
    loss_coefficients: Mapping[str, float] = MappingProxyType({LM_LOSS: 1.0})

    def initialize(self, weights: Mapping[str, Shard], seed: int) -> None:
        """Set what weights begin as, equal under every layout; no communication.

        Called by a model that fills itself, and after a model that left its matrices on the
        meta device was sharded.

        Args:
            weights: what this rank holds of some or all of them, by logical name.
            seed: of the whole model, equal on all ranks.
        """
        initialize_(weights, self.config, seed)

    @property
    @abstractmethod
    def read_entries(self) -> frozenset[str]:
        """Entries that this stage reads, after ``prepare``."""

    def prepare(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Add entries that follow from others and need whole rows, before they are cut.

        Args:
            batch: whole rows of what this stage and others on its rank read.

        Returns:
            The batch; its own entries must stay as they are.
        """
        return batch

    @abstractmethod
    def run_stage(
        self, batch: MicroBatch, received: Payload | None
    ) -> tuple[Payload, Float[Tensor, ""]]:
        """Run this stage's layers on one micro-batch.

        Args:
            batch: has what ``read_entries`` says.
            received: from the stage before; None on the first.

        Returns:
            What the next stage needs, or ``losses`` on the last one; and this stage's
            auxiliary losses, coefficients included.
        """

    @abstractmethod
    def payload_shape(self, batch: MicroBatch, sender: int, num_cuts: int, /) -> PayloadShape:
        """Shape of what a stage sends on, from shapes of the batch alone.

        Args:
            batch: also with entries on the meta device.
            sender: the stage, counted in the order of the model.
            num_cuts: tensor ranks that share a sequence; 1 without sequence parallelism.
        """

    @abstractmethod
    def loss_masks(self, batch: MicroBatch) -> Mapping[str, Float[Tensor, "..."]]:
        """Say which token losses of each loss count on this rank; on the last stage.

        Returns:
            By name of the loss, of the shape that ``unreduced_losses`` gives it.
        """

    def losses(
        self, output: Payload, batch: MicroBatch, weights: Mapping[str, Tensor]
    ) -> Mapping[str, Float[Tensor, ""]]:
        """Sum each loss with weights; every sum must be a root of backward.

        Args:
            output: of ``run_stage`` on the last stage.
            batch: the same.
            weights: of each token loss: mask x coefficient / global count.
        """
        found = self.unreduced_losses(output, batch)
        return {name: (loss * weights[name]).sum() for name, loss in found.items()}

    @abstractmethod
    def unreduced_losses(
        self, output: Payload, batch: MicroBatch
    ) -> Mapping[str, Float[Tensor, "..."]]:
        """Return every token's losses, float32 or wider, coefficients left out.

        Args:
            output: of ``run_stage`` on the last stage.
            batch: the same.
        """

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "s B D"]) -> Float[Tensor, "S B v"]:
        """Score the vocabulary: this rank's slice of it, padding included.

        Args:
            hidden: that the head reads, of ``forward`` on the last stage.
        """

    def stage_logits(self, output: Payload) -> Float[Tensor, "S B v"]:
        """Return ``logits`` of what ``run_stage`` returned on the last stage."""
        assert isinstance(output, Tensor)
        return self.logits(output)


class LanguageModel(TrainableModel):
    """A causal model: scores the next token at every place, and can generate."""

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
    def token_losses(
        self, hidden: Float[Tensor, "s B D"], labels: Int[Tensor, "B S"]
    ) -> Float[Tensor, "B S"]:
        """Cross-entropy of every token, float32 or wider, with any gradient."""

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

    @property
    def read_entries(self) -> frozenset[str]:
        """Tokens where they are embedded, labels and mask where the loss is."""
        names = (TOKENS,) * self.stage.has_embedding
        names += (LABELS, LOSS_MASK) * self.stage.has_loss
        return frozenset(names)

    def run_stage(
        self, batch: MicroBatch, received: Payload | None
    ) -> tuple[Payload, Float[Tensor, ""]]:
        """Run ``forward`` on the tokens, or on the hidden state of the stage before."""
        x = batch[TOKENS] if received is None else received
        assert isinstance(x, Tensor)
        return self(x, batch.positions, documents=batch.documents)

    def payload_shape(self, batch: MicroBatch, _sender: int, num_cuts: int, /) -> PayloadShape:
        """Shape of a hidden state, the same for all stages."""
        num_rows, length = batch[TOKENS].shape
        return length // num_cuts, num_rows, self.config.hidden_size

    def loss_masks(self, batch: MicroBatch) -> Mapping[str, Float[Tensor, "..."]]:
        """Return the mask of the next tokens."""
        return {LM_LOSS: batch[LOSS_MASK]}

    def losses(
        self, output: Payload, batch: MicroBatch, weights: Mapping[str, Tensor]
    ) -> Mapping[str, Float[Tensor, ""]]:
        """Sum ``loss``."""
        assert isinstance(output, Tensor)
        return {LM_LOSS: self.loss(output, batch[LABELS], weights[LM_LOSS])[0]}

    def unreduced_losses(
        self, output: Payload, batch: MicroBatch
    ) -> Mapping[str, Float[Tensor, "..."]]:
        """Return ``token_losses``."""
        assert isinstance(output, Tensor)
        return {LM_LOSS: self.token_losses(output, batch[LABELS])}


def share_embedding(chunks: Sequence[nn.Module]) -> None:
    """Give the chunks of one rank one embedding, the first one's, in place.

    In a V the first rank holds both ends of the model, which a tied head, or multi-token
    prediction, joins. Comes before ``DataParallel``.
    """
    first, *others = chunks
    for chunk in others:
        if hasattr(first, "embedding") and hasattr(chunk, "embedding"):
            chunk.embedding = first.embedding
