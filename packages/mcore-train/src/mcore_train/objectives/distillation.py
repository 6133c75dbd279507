"""Distillation: trains a student to follow the distributions of a frozen teacher.

The loss is ``w t^2 KL(teacher || student) + (1 - w) cross-entropy``, where the divergence
compares both models at temperature t, over a vocabulary that stays split over the tensor ranks.
With ``--distill-top-k`` the teacher's k most probable tokens are compared, and the sum of all
other tokens as one more class: a lower bound of the divergence, exact if k is the vocabulary,
and small enough to be stored with the data.

Reference:
    Hinton et al. 2015, Distilling the Knowledge in a Neural Network. arXiv:1503.02531.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_models.protocol import LABELS, LM_LOSS, LOSS_MASK, MicroBatch
from mcore_parallel.pipeline_parallel.runner import Payload
from mcore_parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mcore_parallel.tensor_parallel.distributions import (
    vocab_parallel_kl,
    vocab_parallel_log_probs,
    vocab_parallel_top_k,
)
from mcore_train.objectives.objective import Objective

TEACHER_HIDDEN = "teacher_hidden"
"""Entry ``[B, s, D]``: the teacher's last hidden states, the input of its head."""
TEACHER_IDS, TEACHER_LOG_PROBS = "teacher_ids", "teacher_log_probs"
"""Entries ``[B, S, k]``: the teacher's most probable tokens, and their log-probabilities."""
LOSS = "distillation loss"


class Distillation(Objective):
    """Divergence from the teacher, and the language-model loss of the data."""

    @property
    def has_reference(self) -> bool:
        """True: the frozen model is the teacher."""
        return True

    @property
    def stored_entries(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Ids and log-probabilities of ``--distill-top-k`` tokens."""
        k = self.config.distillation.distill_top_k
        return {TEACHER_IDS: ("int32", (k,)), TEACHER_LOG_PROBS: ("float32", (k,))} if k else {}

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Return both losses; the loss of the data is a metric if its weight is 0."""
        weight = self.config.distillation.distill_weight
        return {LM_LOSS: 1.0 - weight, LOSS: weight}

    def masks(self, batch: MicroBatch) -> Mapping[str, Float[Tensor, "B S"]]:
        """Return the mask of the data for both losses."""
        return {LM_LOSS: batch[LOSS_MASK], LOSS: batch[LOSS_MASK]}

    def reference_entries(self, output: Payload, _batch: MicroBatch, /) -> Mapping[str, Tensor]:
        """Return the teacher's top tokens; for whole distributions, its hidden states.

        The hidden states of a step's micro-batches are kept until their losses are computed;
        logits exist for one micro-batch at a time.
        """
        options = self.config.distillation
        if not options.distill_top_k:
            assert isinstance(output, Tensor)
            return {TEACHER_HIDDEN: output.transpose(0, 1)}
        model = self.reference
        assert model is not None
        ids, log_probs = vocab_parallel_top_k(
            model.stage_logits(output),
            options.distill_top_k,
            vocab_size=model.vocab_size,
            axis=model.tp,
            temperature=options.distill_temperature,
        )
        return {
            TEACHER_IDS: ids.transpose(0, 1),
            TEACHER_LOG_PROBS: log_probs.transpose(0, 1),
        }

    def unreduced_losses(
        self, output: Payload, batch: MicroBatch
    ) -> Mapping[str, Float[Tensor, "B S"]]:
        """Return both losses of every token; all-reduces over the tensor ranks."""
        options, model = self.config.distillation, self.model
        logits = model.stage_logits(output)
        data_loss = vocab_parallel_cross_entropy(
            logits,
            batch[LABELS].t(),
            vocab_size=model.vocab_size,
            padded_vocab_size=logits.shape[-1] * model.tp.size,
            axis=model.tp,
        ).t()
        t = options.distill_temperature
        if options.distill_top_k:
            ids, log_p = (
                batch[name].transpose(0, 1) for name in (TEACHER_IDS, TEACHER_LOG_PROBS)
            )
            divergence = self._top_k_divergence(logits, ids.long(), log_p)
        else:
            assert self.reference is not None
            with torch.no_grad():
                hidden = batch[TEACHER_HIDDEN].transpose(0, 1)
                teacher_logits = self.reference.stage_logits(hidden)
            divergence = vocab_parallel_kl(
                logits,
                teacher_logits,
                vocab_size=model.vocab_size,
                axis=model.tp,
                temperature=t,
            )
        if not self.coefficients[LM_LOSS]:
            data_loss = data_loss.detach()
        return {LM_LOSS: data_loss, LOSS: divergence.t() * t**2}

    def _top_k_divergence(
        self,
        logits: Float[Tensor, "S B v"],
        ids: Int[Tensor, "S B k"],
        log_p: Float[Tensor, "S B k"],
    ) -> Float[Tensor, "S B"]:
        """Return the divergence over the teacher's top tokens and the sum of all others."""
        log_q = vocab_parallel_log_probs(
            logits,
            ids,
            vocab_size=self.model.vocab_size,
            axis=self.model.tp,
            temperature=self.config.distillation.distill_temperature,
        )
        log_p = log_p.to(log_q.dtype)
        top = (log_p.exp() * (log_p - log_q)).sum(-1)
        rest_p, rest_q = _rest(log_p), _rest(log_q)
        return top + torch.where(rest_p > 0, rest_p * (rest_p.log() - rest_q.log()), 0.0)


def _rest(log_probs: Float[Tensor, "*T k"]) -> Float[Tensor, "*T"]:
    """Return the probability of all other tokens, at least the rounding error."""
    smallest = torch.finfo(log_probs.dtype).eps
    return (1.0 - log_probs.exp().sum(-1)).clamp(min=smallest)
