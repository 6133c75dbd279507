"""An objective of your own: cross-entropy that gives hard tokens more weight.

    mcore-train gpt --objective examples/own_objective.py:FocalLoss --mock-data \\
        --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-3 \\
        --train-iters 2

docs/objectives.md describes the methods. Reference of the loss: Lin et al. 2017, Focal Loss for
Dense Object Detection, eq. 4. arXiv:1708.02002.
"""

from mcore_models.protocol import LM_LOSS, LOSS_MASK
from mcore_train.objectives.objective import Objective, token_log_probs

GAMMA = 2.0


class FocalLoss(Objective):
    """Loss of a token with probability p: -(1 - p)^gamma log p."""

    @property
    def coefficients(self):
        """Train by the focal loss; log the plain cross-entropy as a metric."""
        return {"focal loss": 1.0, LM_LOSS: 0.0}

    def masks(self, batch):
        """Average both over the tokens that count."""
        return dict.fromkeys(self.coefficients, batch[LOSS_MASK])

    def unreduced_losses(self, output, batch):
        """Return both losses of every token, [B, S]."""
        log_probs = token_log_probs(self.model, output, batch)
        focal = -((1 - log_probs.exp()) ** GAMMA) * log_probs
        return {"focal loss": focal, LM_LOSS: -log_probs.detach()}
