"""Scales the loss for float16, whose smallest numbers are too large for gradients.

The loss is multiplied by a power of two before backward, and gradients are divided by it before
the update. A dynamic scale is halved when gradients overflow, and the step is skipped; the
scale is doubled after a number of steps without overflow. A fixed scale never changes.

Reference:
    Micikevicius et al. 2018, Mixed Precision Training, 3.2. arXiv:1710.03740.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_train.config import PrecisionConfig


class LossScaler:
    """Loss scale of a run, equal on all ranks.

    Attributes:
        scale: scalar on the device, written in place, so that CUDA graphs may read it.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self._config = config
        self._value = config.loss_scale or config.initial_loss_scale
        self.scale: Float[Tensor, ""] = torch.full((), self._value, device=device)
        self._num_good = 0
        self._num_left = config.hysteresis  # overflows until the scale is halved

    @property
    def value(self) -> float:
        """The scale, on the host."""
        return self._value

    def update(self, *, is_finite: bool) -> bool:
        """Set the scale of the next step; no communication.

        Returns:
            Whether a step that is not finite may be skipped, since a lower scale can still
            help.
        """
        config = self._config
        if config.loss_scale:
            return False
        if is_finite:
            self._num_good += 1
            if self._num_good == config.loss_scale_window:
                self._num_good, self._num_left = 0, config.hysteresis
                self._set(2.0 * self._value)
            return True
        was_smallest = self._value <= config.min_loss_scale
        self._num_good = 0
        self._num_left -= 1
        if self._num_left <= 0:
            self._set(max(self._value / 2.0, config.min_loss_scale))
        return not was_smallest

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain numbers."""
        return {"scale": self._value, "good": self._num_good, "patience": self._num_left}

    def set_state(self, state: dict[str, Any]) -> None:
        """Set the state from a checkpoint; a fixed ``--loss-scale`` does not change."""
        if not self._config.loss_scale:
            self._num_good, self._num_left = state["good"], state["patience"]
            self._set(state["scale"])

    def _set(self, value: float) -> None:
        self._value = value
        self.scale.fill_(value)
