"""Ends a run whose gradients are not finite, or whose replicas of weights differ.

Gradients hold nan or infinity as soon as a loss, an activation or a weight does, and their
norm is the same number on all ranks: all of them end at the same step without communication.
The norm is read one step after it was computed, so the host never waits for the device.

A GPU that computes wrongly once in a while crashes nothing: its replica of the weights differs
from then on, and every later gradient mixes both. A comparison at an interval bounds what is
lost. (With a sharded optimizer every update makes the replicas equal again, so a comparison
sees what went wrong since the last one.)
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.data_parallel.replica_checks import UnlikeWeightsError


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


class HostCopy:
    """A copy of a tensor for the host, which reads it without waiting for later work."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._copied = tensor.detach(), None
        if tensor.is_cuda:
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Tensor:
        """Return the copy once it is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor


class FiniteGradients:
    """Watches the gradient norms of a run, each one step late."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self._iteration = 0
        self._norm: HostCopy | None = None

    def add(
        self,
        iteration: int,
        grad_norm: Float[Tensor, ""],
        is_skipped: bool | Bool[Tensor, ""] = False,
    ) -> None:
        """Check the norm of the step before, and keep this step's.

        Call it before ``Checkpoints.poll``: a background save of a step with a bad norm is then
        abandoned before it becomes a checkpoint.

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
        if isinstance(is_skipped, Tensor):
            grad_norm, is_skipped = torch.where(is_skipped, 0.0, grad_norm), False
        self._iteration = iteration
        self._norm = None if is_skipped else HostCopy(grad_norm)

    def check(self) -> None:
        """Check the last norm, waiting for the device: before a save in the foreground.

        Raises:
            NonFiniteError: on all ranks, if it is not finite.
        """
        norm, self._norm = self._norm, None
        if norm is not None and not math.isfinite(found := norm.read().item()):
            raise NonFiniteError(self._iteration, found)


class WeightCopies:
    """Compares the copies of a run's weights, and records when they were equal last."""

    def __init__(self, data_parallel: GradientSync, iteration: int) -> None:
        """Begin at a step whose copies are equal; no communication."""
        self._data_parallel = data_parallel
        self._equal = iteration

    def check(self, iteration: int) -> None:
        """Compare after a step; all ranks call it, and wait for their devices.

        Raises:
            UnlikeWeightsError: on all ranks, if copies differ, with the tensor and the last
                step at which copies were equal.
        """
        try:
            self._data_parallel.check_weights()
        except UnlikeWeightsError as error:
            raise UnlikeWeightsError(
                f"after iteration {iteration}: {error} The copies were equal after iteration "
                f"{self._equal}: continue on other hosts from a checkpoint no later than that "
                "(--ckpt-step)."
            ) from error
        self._equal = iteration
