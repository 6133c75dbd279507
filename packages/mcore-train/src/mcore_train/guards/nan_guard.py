"""Ending a run whose numbers are not finite any more, before it overwrites what was good.

Gradients hold nan or infinity as soon as a loss, an activation or a weight does, and their
norm is the same number on all ranks: all of them end at the same step without talking. The
norm is read one step after it was computed, so the host never waits for the device.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor


class NonFiniteError(FloatingPointError):
    """A gradient norm is nan or infinite.

    Attributes:
        iteration: the step whose gradients they are.
    """

    def __init__(self, iteration: int, norm: float) -> None:
        super().__init__(
            f"the gradient norm of iteration {iteration} is {norm}: the weights after it are "
            "of no use, and none were saved. Continue from the last checkpoint with a lower "
            "--lr, a longer warm-up or --clip-grad (under --fp16 a lower --loss-scale or "
            "--min-loss-scale), or look at the samples of this step and those before "
            "(mcore-data explain). --no-check-for-nan-in-loss-and-grad trains on."
        )
        self.iteration = iteration


class FiniteGradients:
    """Watches the gradient norms of a run, each one step late."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self._iteration = 0
        self._norm: Tensor | None = None
        self._is_skipped = False
        self._copied: torch.cuda.Event | None = None

    def add(
        self,
        iteration: int,
        grad_norm: Float[Tensor, ""],
        is_skipped: bool = False,
    ) -> None:
        """Look at the norm of the step before, and take this step's.

        Call it before a background save moves on: what was requested after the step before is
        then given up, and never was a checkpoint.

        Args:
            iteration: of this step.
            grad_norm: its norm.
            is_skipped: whether weights stayed as they were, so that any norm is good.

        Raises:
            NonFiniteError: as ``check``, for the step before.
        """
        if not self.is_on:
            return
        self.check()
        self._iteration, self._norm = iteration, grad_norm.detach()
        self._is_skipped = is_skipped
        if grad_norm.is_cuda:
            self._norm = torch.empty_like(grad_norm, device="cpu", pin_memory=True)
            self._norm.copy_(grad_norm, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def check(self) -> None:
        """Look at the last norm taken, waiting for it: before a save in the foreground.

        Raises:
            NonFiniteError: on all ranks, if it is not finite.
        """
        norm, self._norm = self._norm, None
        if norm is None or self._is_skipped:
            return
        if self._copied is not None:
            self._copied.synchronize()
        if not math.isfinite(found := norm.item()):
            raise NonFiniteError(self._iteration, found)
