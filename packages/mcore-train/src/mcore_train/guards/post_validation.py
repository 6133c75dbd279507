"""Optimizer steps that are validated afterwards: no stage waits for the norm of all gradients.

A step's weights are updated as if nothing were clipped, and the next step's forwards begin. Its
first backward (or loss) here needs the memory of the gradients: before it the norm is read,
which has had the time of these forwards to be summed. Where a step should have been clipped,
every rank learns so from the same number: the forwards are given up, the weights are taken
back, updated as they should be, and the step begins anew. Optimizer state follows the weights
once they are right, so that it never needs a copy. A step in float16 whose gradients overflowed
is taken back whole, before any loss is computed at the new scale.

Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 4. Differs: all
ranks look at the same sum, none at a partial one.
"""

from collections.abc import Callable
from math import isfinite

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.data_parallel.grads import clip_coefficient
from mcore_train.loss_scaling import LossScaler

Rates = tuple[float, float]
"""Learning rate and weight decay of a step."""


class PostValidation:
    """The step whose weights are in use and not yet known to be right, if there is one.

    Attributes:
        is_due: whether the step that comes may be validated by the one after it; off where its
            numbers are wanted at once.
        num_kept: steps that were right as proposed so far.
        num_redone: steps that were taken back.
    """

    def __init__(
        self, optimizer: DistributedOptimizer, max_norm: float, scaler: LossScaler | None = None
    ) -> None:
        """Begin without a step; no communication.

        Args:
            optimizer: whose weights are proposed.
            max_norm: norm above which gradients are clipped; 0: never.
            scaler: of the loss, updated when a step is validated; None: gradients are not
                scaled.
        """
        self.optimizer, self.max_norm, self.scaler = optimizer, max_norm, scaler
        self.is_due = False
        self.num_kept = self.num_redone = 0
        self._unscale = 1.0
        self._rates: Rates = (0.0, 0.0)
        self._read_norm: Callable[[], float] | None = None
        self._norm = torch.zeros((), dtype=torch.float64)
        self._is_skipped = torch.zeros((), dtype=torch.bool)
        self._before_update: Callable[[], None] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether weights are in use that were not validated."""
        return self._read_norm is not None

    def propose(
        self, lr: float, weight_decay: float, before_update: Callable[[], None] | None
    ) -> tuple[Float[Tensor, ""], Bool[Tensor, ""]]:
        """Update the weights without clipping; starts one all-reduce over the world.

        Returns:
            The norm of the gradients, and whether the step is skipped since they overflowed:
            both on the host, and written once the step is validated.
        """
        self._rates, self._before_update = (lr, weight_decay), before_update
        self._unscale = 1.0 if self.scaler is None else 1.0 / self.scaler.value
        self._norm = torch.full((), float("nan"), dtype=torch.float64)
        self._is_skipped = torch.zeros((), dtype=torch.bool)
        self._read_norm = self.optimizer.start_grad_norm()
        if before_update is not None:
            before_update()
        self.optimizer.propose(lr, weight_decay, self._unclipped() * self._unscale)
        return self._norm, self._is_skipped

    def accept(self) -> bool:
        """Read the norm and, if nothing is clipped, let state follow; else nothing changes.

        The same on all ranks. Updates the scale of the loss.

        Returns:
            Whether the weights in use are right; ``redo`` must follow where they are not.
        """
        assert self._read_norm is not None
        norm = self._read_norm()
        is_finite = isfinite(norm)
        may_skip = self.scaler is not None and self.scaler.update(is_finite=is_finite)
        self._norm.fill_(norm * self._unscale)
        self._is_skipped.fill_(may_skip and not is_finite)
        if self._is_skipped:
            return False
        if self.max_norm and not bool(clip_coefficient(self._norm, self.max_norm) == 1.0):
            return False
        if self._before_update is not None:
            self._before_update()
        self.optimizer.accept()
        self.num_kept += 1
        self._read_norm = None
        return True

    def redo(self) -> None:
        """Take the weights back and, unless gradients overflowed, update them by clipped ones.

        Gathers the weights over the data ranks.
        """
        self.num_redone += 1
        self.optimizer.withdraw()
        if self._is_skipped:
            self.optimizer.refresh()
        else:
            scale = clip_coefficient(self._norm, self.max_norm) * self._unscale
            device = self.optimizer.data_parallel.ctx.device
            self.optimizer.step(*self._rates, scale.to(device))
        self._read_norm = None

    def take_skipped(self) -> bool:
        """Return whether the step validated last was skipped, once."""
        is_skipped, self._is_skipped = self._is_skipped, torch.zeros((), dtype=torch.bool)
        return bool(is_skipped)

    def settle(self) -> None:
        """Validate at once what is pending: before weights are saved or scored."""
        if self.is_pending and not self.accept():
            self.redo()

    def _unclipped(self) -> Float[Tensor, ""] | float:
        """What the clip coefficient of a small norm is, in the form that ``step`` gets it."""
        device = self.optimizer.data_parallel.ctx.device
        return torch.ones((), dtype=torch.float64, device=device) if self.max_norm else 1.0
