"""Finds spikes: compares a step's loss and gradient norm with the last steps, on the device.

A step is a spike if its loss or its gradient norm is not finite, or above the mean of the last
steps by some standard deviations. The decision is made on the device, from numbers that are
equal on all ranks: the host does not wait, and all ranks skip a step or none does. A spike
enters the window with the limit that it exceeded: several spikes in a row are all found, but a
level that stays higher, as while the learning rate rises, becomes normal after a few steps.

OLMo-core's SkipStepOptimizer has the same test, 6 standard deviations over the last 128 steps,
and lets spikes enter with their own size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mcore_train.config import SpikeConfig

LEARNED_STEPS = 16
"""Least number of recorded steps for ``largest_norm``."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a step is a spike, and the statistics of the decision; on the device."""

    is_spike: Bool[Tensor, ""]
    numbers: Float[Tensor, "2 3"]
    """Rows: loss, gradient norm; columns: of the step, mean and standard deviation before."""


class RecentSteps:
    """A window of the last steps; equal on all ranks."""

    def __init__(self, config: SpikeConfig, device: torch.device) -> None:
        """Begin without steps.

        Args:
            config: with ``--spike-policy none`` only numbers that are not finite are spikes.
            device: of the window.
        """
        self._sigmas = config.spike_sigmas if config.spike_policy != "none" else None
        window = config.spike_window
        self._values = torch.zeros(2, window, dtype=torch.float64, device=device)
        self._num_added = torch.zeros((), dtype=torch.int64, device=device)
        self._places = torch.arange(window, device=device)

    def judge(self, loss: Float[Tensor, ""], norm: Float[Tensor, ""]) -> Judgement:
        """Compare a step with the window, if the window is full, and add the step.

        Args:
            loss: main loss of the step over all ranks.
            norm: of its gradients.
        """
        new = torch.stack([loss, norm]).double()
        # Mean and standard deviation of the filled places, without a wait for the count.
        is_known = self._places < self._num_added
        count = is_known.sum()
        mean = torch.where(is_known, self._values, 0.0).sum(1) / count.clamp(min=1)
        squares = torch.where(is_known, self._values - mean[:, None], 0.0).square().sum(1)
        deviation = (squares / (count - 1).clamp(min=1)).sqrt()
        is_finite, added = new.isfinite().all(), new
        is_spike = ~is_finite
        if self._sigmas is not None:
            limit = mean + self._sigmas * deviation
            is_full = count == len(self._places)
            is_spike = is_spike | (is_full & (new > limit).any())
            added = torch.where(is_full, torch.minimum(new, limit), new)
        # The window is a ring buffer; steps that are not finite are not added.
        is_place = self._places == self._num_added % len(self._places)
        self._values.copy_(torch.where(is_place & is_finite, added[:, None], self._values))
        self._num_added += is_finite
        return Judgement(is_spike, torch.stack([new, mean, deviation], 1))

    def largest_norm(self) -> float:
        """Return the largest gradient norm, 0 with too few steps; waits for the device."""
        is_known = self._places < self._num_added
        largest = torch.where(is_known, self._values[1], 0.0).amax()
        return torch.where(self._num_added >= LEARNED_STEPS, largest, 0.0).item()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain numbers; waits for the device."""
        return {"values": self._values.tolist(), "num_added": int(self._num_added)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Set the state from a checkpoint; with another window, the newest steps that fit."""
        values = torch.tensor(state["values"], dtype=torch.float64)
        size, stored = len(self._places), values.shape[1]
        num_kept = min(size, stored, state["num_added"])
        first = state["num_added"] - num_kept
        self._num_added.fill_(state["num_added"] if size == stored else num_kept)
        for index in range(num_kept):
            place = (first + index) % size if size == stored else index
            self._values[:, place] = values[:, (first + index) % stored]
