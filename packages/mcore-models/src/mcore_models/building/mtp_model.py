"""Language models with multi-token prediction: batches, masks and losses of further tokens.

Complete rows are shifted before context ranks split them, so that the last token of a rank's
chunk gets the first token of the next chunk. Each depth has a separate loss, divided by the
depth's global count of valid tokens and logged next to the main loss: ``mtp_1 loss`` and so on.
"""

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_models.layers.mtp import has_token, shifted
from mcore_models.protocol import (
    LABELS,
    LM_LOSS,
    LOSS_MASK,
    TEXT,
    TOKENS,
    BatchEntry,
    LanguageModel,
    MicroBatch,
    ModelState,
)
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.pipeline_parallel.runner import Payload, PayloadShape

MTP_TOKENS, MTP_LABELS, MTP_MASK = "mtp_tokens", "mtp_labels", "mtp_loss_mask"
"""Entries ``[B, S, K]`` that ``prepare`` adds, one slice for each of K depths."""
_ENTRIES = MappingProxyType(
    {
        **TEXT,
        **{name: BatchEntry(is_derived=True) for name in (MTP_TOKENS, MTP_LABELS, MTP_MASK)},
    }
)


class MTPLanguageModel(LanguageModel):
    """A causal model with ``mtp_num_layers`` layers that predict further tokens.

    These layers run on the stage of the loss, or on an earlier stage, which then also has the
    final norm and sends the hidden states of all depths to the stage of the loss.
    """

    def add_further_losses(self) -> None:
        """Set ``entries`` and ``loss_coefficients`` for every depth; called when building."""
        depths = self.config.mtp_num_layers
        if depths:
            self.entries = _ENTRIES
            share = self.config.mtp_loss_scaling_factor / depths
            names = {_name(depth): share for depth in range(depths)}
            self.loss_coefficients = MappingProxyType({LM_LOSS: 1.0, **names})

    @property
    def predicts_further(self) -> bool:
        """Whether this stage runs the layers that predict further tokens."""
        return self.config.mtp_num_layers > 0 and self.stage.has_mtp

    @property
    def is_normed(self) -> bool:
        """Whether this stage has the final norm."""
        return self.stage.has_mtp if self.config.mtp_num_layers else self.stage.has_loss

    @abstractmethod
    def further_hidden(
        self, hidden: Float[Tensor, "s B D"], batch: MicroBatch
    ) -> tuple[list[Float[Tensor, "s B D"]], Float[Tensor, ""]]:
        """Return the hidden state of every depth and the auxiliary losses of their layers."""

    @abstractmethod
    def draft_hidden(
        self,
        hidden: Float[Tensor, "T 1 D"],
        tokens: Int[Tensor, "1 T"],
        positions: Int[Tensor, " T"],
        state: ModelState,
    ) -> Float[Tensor, "T 1 D"]:
        """Run the first of these layers to draft tokens; ``logits`` scores the result.

        Args:
            hidden: normed result of ``forward``, or this method's result for the previous
                token.
            tokens: the token one position after each hidden state.
            positions: of the hidden states.
            state: of earlier tokens in this layer; these tokens are appended.
        """

    @property
    def read_entries(self) -> frozenset[str]:
        """Entries of a language model, and the further tokens, labels and masks it reads."""
        names = super().read_entries
        if self.predicts_further:
            names |= {TOKENS, MTP_TOKENS}
        if self.config.mtp_num_layers and self.stage.has_loss:
            names |= {MTP_LABELS, MTP_MASK}
        return names

    def prepare(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Add tokens, labels and masks of every depth, shifted within complete rows."""
        if not self.config.mtp_num_layers:
            return batch
        prepared, shifts = dict(batch), range(1, self.config.mtp_num_layers + 1)
        for name, further in ((TOKENS, MTP_TOKENS), (LABELS, MTP_LABELS)):
            if name in batch:
                prepared[further] = torch.stack([shifted(batch[name], by) for by in shifts], -1)
        if LOSS_MASK in batch:
            mask, borders = batch[LOSS_MASK], batch.get("cu_seqlens")
            documents = None if borders is None else Documents.from_cu_seqlens(borders)
            num_rows, length = mask.shape
            # A further token counts if it counts itself and is in the document of its position.
            valid = [
                has_token(num_rows, length, by, documents).to(mask.device) for by in shifts
            ]
            masks = [shifted(mask, by) * ok for by, ok in zip(shifts, valid, strict=True)]
            prepared[MTP_MASK] = torch.stack(masks, -1)
        return prepared

    def run_stage(
        self, batch: MicroBatch, received: Payload | None
    ) -> tuple[Payload, Float[Tensor, ""]]:
        """Run ``forward``, then the layers of every depth on the stage that has them.

        Later stages return the received hidden states of all depths unchanged.
        """
        if isinstance(received, Mapping):
            hidden = received[LM_LOSS]
            wide = torch.promote_types(hidden.dtype, torch.float32)
            return received, torch.zeros((), dtype=wide, device=hidden.device)
        hidden, aux = super().run_stage(batch, received)
        if not self.predicts_further:
            return hidden, aux
        assert isinstance(hidden, Tensor)
        further, further_aux = self.further_hidden(hidden, batch)
        payload = {LM_LOSS: hidden, **dict(zip(self._names(), further, strict=True))}
        return payload, aux + further_aux

    def payload_shape(self, batch: MicroBatch, sender: int, num_cuts: int, /) -> PayloadShape:
        """Return the shape of a hidden state; by depth after the stage with the MTP layers."""
        shape = super().payload_shape(batch, sender, num_cuts)
        mtp_stage = self.stage.mtp_stage
        if mtp_stage < 0 or sender < mtp_stage or isinstance(shape, Mapping):
            return shape
        return dict.fromkeys(self.loss_coefficients, shape)

    def loss_masks(self, batch: MicroBatch) -> Mapping[str, Float[Tensor, "..."]]:
        """Return the masks of the next token and of further tokens."""
        masks = {n: batch[MTP_MASK][..., depth] for depth, n in enumerate(self._names())}
        return {**super().loss_masks(batch), **masks}

    def losses(
        self, output: Payload, batch: MicroBatch, weights: Mapping[str, Tensor]
    ) -> Mapping[str, Float[Tensor, ""]]:
        """Sum ``loss`` of every depth."""
        return {
            name: self.loss(hidden, labels, weights[name])[0]
            for name, hidden, labels in self._scored(output, batch)
        }

    def unreduced_losses(
        self, output: Payload, batch: MicroBatch
    ) -> Mapping[str, Float[Tensor, "..."]]:
        """Return ``token_losses`` of every depth."""
        return {
            name: self.token_losses(hidden, labels)
            for name, hidden, labels in self._scored(output, batch)
        }

    def stage_logits(self, output: Payload) -> Float[Tensor, "S B v"]:
        """Return ``logits`` of the next token."""
        return super().stage_logits(output if isinstance(output, Tensor) else output[LM_LOSS])

    def _names(self) -> list[str]:
        return list(self.loss_coefficients)[1:]

    def _scored(self, output: Payload, batch: MicroBatch) -> Any:
        """Yield name, hidden state and labels of every loss."""
        if isinstance(output, Tensor):
            yield LM_LOSS, output, batch[LABELS]
            return
        yield LM_LOSS, output[LM_LOSS], batch[LABELS]
        for depth, name in enumerate(self._names()):
            yield name, output[name], batch[MTP_LABELS][..., depth]


def _name(depth: int) -> str:
    return f"mtp_{depth + 1} loss"
