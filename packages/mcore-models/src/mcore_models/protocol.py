"""Interfaces between models and their users: training, verification, generation.

Training and verification use every model as a ``TrainableModel``: its inputs are named tensors
of a batch, its stages pass a payload on, and its outputs are named losses. Generation requires
a ``LanguageModel``. A model accepts any object with the methods of ``ModelState``.
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
from mcore_models.logical_tensors import payload_width
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.pipeline_parallel.runner import Payload, PayloadShape
from mcore_parallel.pipeline_parallel.stages import Stage
from mcore_parallel.sharding import Shard

LM_LOSS = "lm loss"
"""Name of the main loss of every model, as in Megatron's log."""


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One named tensor of a batch."""

    length: str = "seq_length"
    """Option that sets the length of the entry's rows; empty: one number for each row."""
    is_cut: bool = True
    """Whether context ranks split each row; otherwise every context rank has complete rows."""
    is_derived: bool = False
    """Whether ``TrainableModel.prepare`` computes the entry; otherwise the dataset has it."""


TOKENS, LABELS, LOSS_MASK = "tokens", "labels", "loss_mask"
"""Entries of a batch of plain text, all ``[B, S]``: ids, next ids, 1 for tokens that count."""
TEXT: Mapping[str, BatchEntry] = MappingProxyType(
    {n: BatchEntry() for n in (TOKENS, LABELS, LOSS_MASK)}
)
"""Entries of a decoder-only model."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch on a rank: its context rank's part of each sequence."""

    entries: Mapping[str, Shaped[Tensor, "B ..."]]
    """Entries by name, batch first; on the meta device if no stage of this rank reads them."""
    positions: Int[Tensor, "B Q"] | None = None
    """Positions of the tokens if they are not 0 to S-1."""
    documents: Documents | None = field(default=None)
    """Documents packed in the complete rows; they do not attend to each other."""

    def __getitem__(self, name: str) -> Shaped[Tensor, "B ..."]:
        """Return an entry."""
        return self.entries[name]


@runtime_checkable
class LayerState(Protocol):
    """State of earlier tokens in one attention layer, in any storage."""

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
        """Store the new tokens' keys and values; return attention to new and stored keys.

        Args:
            q: queries of the new tokens, rotated; this rank's heads.
            k: keys of the new tokens, rotated.
            v: values of the new tokens; None (latent attention): the first J channels of ``k``.
            value_dim: J if ``v`` is None.
            window: keys before a query's own that the query attends to; -1: all.
            backend: kernels to use, see ``attend``.
            scores: ``scale``, ``chunk``, ``softcap`` and ``sinks`` of the model, if any, for
                ``attend``.
        """


@runtime_checkable
class RecurrentState(Protocol):
    """State of one recurrent layer: tensors that each forward replaces."""

    def run(
        self,
        mix: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
        *inputs: Shaped[Tensor, "S B ..."],
    ) -> Shaped[Tensor, "S B ..."]:
        """Run ``mix`` on the stored state and the new tokens; store the state that it returns.

        Args:
            mix: maps the stored state of some texts (a tuple of tensors ``[B, ...]``; None at
                the start of a text) and the inputs of their new tokens to the outputs and the
                new state. May be called for parts of the batch.
            inputs: of all tokens.

        Returns:
            The outputs of all tokens.
        """


@runtime_checkable
class ModelState(Protocol):
    """State of earlier tokens in a model, layer by layer; provided by an engine.

    During one forward ``length`` does not change; its owner adds the new tokens after the
    forward (in the last layer, or outside).
    """

    @property
    def length(self) -> int:
        """Tokens stored before this forward: the position of the first new one."""

    def layer(self, number: int) -> LayerState:
        """Return the state of a layer, by its global number.

        The state of a recurrent layer is also a ``RecurrentState``.
        """


class TrainableModel(nn.Module, ABC):
    """A model for training, complete or one pipeline stage of it.

    A stage gets a micro-batch and the payload of the previous stage, and returns a payload.
    Losses are computed from the payload of the last stage, each with its own mask. A loss is
    the sum of its masked token losses divided by the number of unmasked tokens, over all
    micro-batches, data and context ranks. Training minimizes the sum of all losses times their
    coefficients.

    Attributes:
        config: shape and numerics of the layers.
        vocab_size: true number of tokens.
        stage: layers of this stage, and whether it has embedding and loss.
        tp: ranks that split the vocabulary.
        pp: ranks that hold the stages.
        dtype: of the activations in payloads.
        entries: of a batch; the first entry of each ``length`` determines the rows' length.
        loss_coefficients: by name of the loss, the main one first; the same on all stages.
    """

    config: TransformerConfig
    vocab_size: int
    stage: Stage
    tp: Axis
    pp: Axis = SINGLE
    dtype: torch.dtype = torch.float32
    entries: Mapping[str, BatchEntry] = TEXT
    loss_coefficients: Mapping[str, float] = MappingProxyType({LM_LOSS: 1.0})

    def initialize(self, weights: Mapping[str, Shard], seed: int) -> None:
        """Fill the initial weights, equal under every layout; no communication.

        Called by the constructor, or by the engine that sharded a model with matrices on the
        meta device.

        Args:
            weights: this rank's part of some or all weights, by logical name.
            seed: of the complete model, equal on all ranks.
        """
        initialize_(weights, self.config, seed)

    @property
    @abstractmethod
    def read_entries(self) -> frozenset[str]:
        """Entries that this stage reads, after ``prepare``."""

    def prepare(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the batch with derived entries, computed from complete rows before a split.

        Args:
            batch: complete rows of the entries that stages of this rank read.

        Returns:
            The batch with added entries; existing entries must be unchanged.
        """
        return batch

    @abstractmethod
    def run_stage(
        self, batch: MicroBatch, received: Payload | None
    ) -> tuple[Payload, Float[Tensor, ""]]:
        """Run this stage's layers on one micro-batch.

        Args:
            batch: with the entries of ``read_entries``.
            received: payload of the previous stage; None on the first stage.

        Returns:
            Payload for the next stage, or for ``losses`` on the last one; and this stage's
            auxiliary losses, coefficients included.
        """

    @abstractmethod
    def payload_shape(self, batch: MicroBatch, sender: int, num_cuts: int, /) -> PayloadShape:
        """Return the shape of a stage's payload from the shapes of a batch.

        Args:
            batch: possibly with entries on the meta device.
            sender: the stage, counted in the order of the model.
            num_cuts: tensor ranks that split a sequence; 1 without sequence parallelism.
        """

    @abstractmethod
    def loss_masks(self, batch: MicroBatch) -> Mapping[str, Float[Tensor, "..."]]:
        """Return the masks of this rank's token losses, by loss; on the last stage.

        Masks have the shapes of ``unreduced_losses``.
        """

    def losses(
        self, output: Payload, batch: MicroBatch, weights: Mapping[str, Tensor]
    ) -> Mapping[str, Float[Tensor, ""]]:
        """Return each loss's weighted sum of token losses; every sum must be a backward root.

        Args:
            output: of ``run_stage`` on the last stage.
            batch: of ``run_stage``.
            weights: of each token loss: mask x coefficient / global count.
        """
        token_losses = self.unreduced_losses(output, batch)
        return {name: (loss * weights[name]).sum() for name, loss in token_losses.items()}

    @abstractmethod
    def unreduced_losses(
        self, output: Payload, batch: MicroBatch
    ) -> Mapping[str, Float[Tensor, "..."]]:
        """Return every token's losses, float32 or wider, without coefficients.

        Args:
            output: of ``run_stage`` on the last stage.
            batch: of ``run_stage``.
        """

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "s B D"]) -> Float[Tensor, "S B v"]:
        """Score the vocabulary: this rank's slice of it, padding included.

        Args:
            hidden: input of the head, from ``forward`` on the last stage.
        """

    def stage_logits(self, output: Payload) -> Float[Tensor, "S B v"]:
        """Return ``logits`` for the result of ``run_stage`` on the last stage."""
        assert isinstance(output, Tensor)
        return self.logits(output)


class LanguageModel(TrainableModel):
    """A causal model: scores the next token at every position, and can generate."""

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
            x: token ids ``[B, S/cp]`` on the first stage; on others the hidden state of the
                previous stage.
            positions: of the tokens, ``[S/cp]`` or ``[B, S/cp]``; None: counted.
            state: of earlier tokens in the layers; these tokens are appended.
            documents: packed in the rows; they do not attend to each other.

        Returns:
            The hidden state, and this stage's auxiliary losses, coefficients included.
        """

    @abstractmethod
    def token_losses(
        self, hidden: Float[Tensor, "s B D"], labels: Int[Tensor, "B S"]
    ) -> Float[Tensor, "B S"]:
        """Return the cross-entropy of every token, float32 or wider, differentiable."""

    @abstractmethod
    def loss(
        self,
        hidden: Float[Tensor, "s B D"],
        labels: Int[Tensor, "B S"],
        weights: Float[Tensor, "B S"],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B S"]]:
        """Return the weighted sum of token losses; the sum must be a root of backward.

        Args:
            hidden: of ``forward`` on the last stage.
            labels: the right token at every position.
            weights: of the token losses: mask divided by the global count of valid tokens.

        Returns:
            The sum, and every token's loss without a gradient.
        """

    @property
    def read_entries(self) -> frozenset[str]:
        """Tokens on the stage with the embedding, labels and mask on the stage of the loss."""
        names = (TOKENS,) * self.stage.has_embedding
        names += (LABELS, LOSS_MASK) * self.stage.has_loss
        return frozenset(names)

    def run_stage(
        self, batch: MicroBatch, received: Payload | None
    ) -> tuple[Payload, Float[Tensor, ""]]:
        """Run ``forward`` on the tokens, or on the hidden state of the previous stage."""
        x = batch[TOKENS] if received is None else received
        assert isinstance(x, Tensor)
        return self(x, batch.positions, documents=batch.documents)

    def payload_shape(self, batch: MicroBatch, _sender: int, num_cuts: int, /) -> PayloadShape:
        """Return the shape of a hidden state, the same for all stages."""
        num_rows, length = batch[TOKENS].shape
        return length // num_cuts, num_rows, payload_width(self.config)

    def loss_masks(self, batch: MicroBatch) -> Mapping[str, Float[Tensor, "..."]]:
        """Return the mask of the next tokens."""
        return {LM_LOSS: batch[LOSS_MASK]}

    def losses(
        self, output: Payload, batch: MicroBatch, weights: Mapping[str, Tensor]
    ) -> Mapping[str, Float[Tensor, ""]]:
        """Return the sum that ``loss`` computes, without full logits in memory."""
        assert isinstance(output, Tensor)
        return {LM_LOSS: self.loss(output, batch[LABELS], weights[LM_LOSS])[0]}

    def unreduced_losses(
        self, output: Payload, batch: MicroBatch
    ) -> Mapping[str, Float[Tensor, "..."]]:
        """Return ``token_losses``."""
        assert isinstance(output, Tensor)
        return {LM_LOSS: self.token_losses(output, batch[LABELS])}


def share_embedding(chunks: Sequence[nn.Module]) -> None:
    """Make all chunks of one rank use the embedding of the first chunk, in place.

    In a V schedule the first rank holds both ends of the model, which share the embedding with
    a tied head or multi-token prediction. Call this function before ``DataParallel``.
    """
    first, *others = chunks
    for chunk in others:
        if hasattr(first, "embedding") and hasattr(chunk, "embedding"):
            chunk.embedding = first.embedding
