"""Direct preference optimization: prefers the chosen answer of a pair to the rejected one.

With the log-probabilities of the answers' tokens summed over each answer, by the model and by
the frozen reference, the reward of an answer is ``beta (log p - log p_reference)`` and the loss
of a pair is ``-log sigmoid(reward of the chosen - reward of the rejected)``; averaged over the
pairs of a step.

Reference:
    Rafailov et al. 2023, Direct Preference Optimization, eq. 7. arXiv:2305.18290.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mcore_data.datasets.preferences import ANSWER_IDS, PAIR_MASK
from mcore_models.protocol import BatchEntry, MicroBatch
from mcore_parallel.collectives import copy_to, reduce_from
from mcore_parallel.pipeline_parallel.runner import Payload
from mcore_train.objectives.objective import (
    REFERENCE_LOG_PROBS,
    AnswerObjective,
    answer_log_probs,
)


class DPO(AnswerObjective):
    """Loss of packed pairs of answers, with the rewards of both as metrics."""

    loss_name = "dpo loss"
    metrics = (
        *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
        *("logps/chosen", "logps/rejected"),
    )
    added_entries = MappingProxyType({ANSWER_IDS: BatchEntry(), PAIR_MASK: BatchEntry()})

    @property
    def has_reference(self) -> bool:
        """True: the frozen model is the reference."""
        return True

    @property
    def stored_entries(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """One float32 number for each token."""
        return {REFERENCE_LOG_PROBS: ("float32", ())}

    def masks(self, batch: MicroBatch) -> Mapping[str, Float[Tensor, "B S"]]:
        """Return a mask with 1 at one token of each pair, for means over pairs."""
        return dict.fromkeys(self.coefficients, batch[PAIR_MASK])

    def unreduced_losses(
        self, output: Payload, batch: MicroBatch
    ) -> Mapping[str, Float[Tensor, "B S"]]:
        """Return the loss and metrics of each token's pair; all-reduces over ``cp``."""
        ids, beta = batch[ANSWER_IDS], self.config.dpo.dpo_beta
        log_probs = self._sums(
            answer_log_probs(self.model, output, batch), ids
        )  # [B, pairs, 2]
        reference = self._sums(batch[REFERENCE_LOG_PROBS].to(log_probs.dtype), ids)
        rewards = beta * (log_probs - reference)
        margins = rewards[..., 0] - rewards[..., 1]
        detached_rewards = rewards.detach()
        pair_losses = {
            self.loss_name: -F.logsigmoid(margins),
            "rewards/chosen": detached_rewards[..., 0],
            "rewards/rejected": detached_rewards[..., 1],
            "rewards/margins": margins.detach(),
            "rewards/accuracies": (detached_rewards[..., 0] > detached_rewards[..., 1]).to(
                detached_rewards.dtype
            ),
            "logps/chosen": log_probs[..., 0].detach(),
            "logps/rejected": log_probs[..., 1].detach(),
        }
        pair = ids // 2  # answers 2i and 2i + 1 of a row are its pair i
        return {name: value.gather(1, pair) for name, value in pair_losses.items()}

    def _sums(
        self, log_probs: Float[Tensor, "B s"], ids: Int[Tensor, "B s"]
    ) -> Float[Tensor, "B P 2"]:
        """Return the sum of log-probabilities of each answer; all-reduces over context ranks.

        A pair's loss counts only on the rank that holds its mask, so backward also sums the
        gradients over context ranks.
        """
        cp = self.ctx.cp
        # Every answer has a token, so tokens bound the number of answers of a row.
        num_answers = 2 * -(-ids.shape[1] * cp.size // 2)
        sums = log_probs.new_zeros(len(ids), num_answers).scatter_add(1, ids, log_probs)
        sums = copy_to(reduce_from(sums, cp), cp)
        return sums.view(len(ids), num_answers // 2, 2)
