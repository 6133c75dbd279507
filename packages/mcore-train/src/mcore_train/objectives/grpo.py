"""Group relative policy optimization: prefers texts with a high reward in their group.

Each step begins with texts that the model writes, a group for each prompt. A text's advantage
is its reward relative to its group. With ``r`` the ratio of a token's probability to that when
it was written, the loss of the token is ``-min(r A, clip(r, 1 - e, 1 + e) A) + beta KL``, with
``KL = p_ref / p - log(p_ref / p) - 1``; averaged over the tokens of each text, then over texts.

Reference:
    Shao et al. 2024, DeepSeekMath, eq. 3 and 4. arXiv:2402.03300.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_models.protocol import BatchEntry, MicroBatch
from mcore_parallel.pipeline_parallel.runner import Payload
from mcore_train.assembly import Run
from mcore_train.objectives.objective import (
    REFERENCE_LOG_PROBS,
    AnswerObjective,
    answer_log_probs,
)
from mcore_train.objectives.rollouts import (
    ADVANTAGES,
    OLD_LOG_PROBS,
    REWARDS,
    TOKEN_SHARES,
    rollout_steps,
)


class GRPO(AnswerObjective):
    """Clipped policy loss of texts that the model wrote."""

    loss_name = "grpo loss"
    metrics = ("reward", "kl", "clip_ratio", "completions/length")
    added_entries = MappingProxyType(
        dict.fromkeys((ADVANTAGES, REWARDS, TOKEN_SHARES), BatchEntry())
    )

    @property
    def has_reference(self) -> bool:
        """Whether the divergence from a reference is part of the loss."""
        return self.config.grpo.grpo_kl_beta > 0

    def masks(self, batch: MicroBatch) -> Mapping[str, Float[Tensor, "B S"]]:
        """Return 1 / length for each token of a text, so that the mask of a text sums to 1."""
        return dict.fromkeys(self.coefficients, batch[TOKEN_SHARES])

    def unreduced_losses(
        self, output: Payload, batch: MicroBatch
    ) -> Mapping[str, Float[Tensor, "B S"]]:
        """Return the loss and metrics of every token; no communication over data ranks."""
        options, advantages = self.config.grpo, batch[ADVANTAGES]
        log_probs = answer_log_probs(self.model, output, batch)
        # Without stored probabilities, the texts were written by the current weights.
        is_stored = OLD_LOG_PROBS in batch.entries
        old = batch[OLD_LOG_PROBS] if is_stored else log_probs.detach()
        ratio = (log_probs - old).exp()
        lower, upper = options.grpo_clamp_eps_lower, options.grpo_clamp_eps_upper
        clipped = ratio.clamp(1 - lower, 1 + upper)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        kl = torch.zeros_like(log_probs)
        if options.grpo_kl_beta:
            change = batch[REFERENCE_LOG_PROBS] - log_probs
            kl = change.exp() - change - 1
            loss = loss + options.grpo_kl_beta * kl
        is_clipped = (clipped * advantages < ratio * advantages).to(loss.dtype)
        shares = batch[TOKEN_SHARES]
        return {
            self.loss_name: loss,
            "reward": batch[REWARDS],
            "kl": kl.detach(),
            "clip_ratio": is_clipped.detach(),
            "completions/length": torch.where(shares > 0, 1.0 / shares, 0.0),
        }

    def open_batches(self, run: Run, /) -> Iterator[list[MicroBatch]]:
        """Write texts and yield the steps on them, see ``rollout_steps``."""
        return rollout_steps(run)
