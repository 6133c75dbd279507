"""Ends a run whose gradients are not finite, or whose replicas of weights differ.

If a loss, an activation or a weight is nan or infinite, so are gradients. Their norm is equal
on all ranks, so all ranks end at the same step without communication. The norm is read one step
after it was computed, so the host never waits for the device.

A GPU that occasionally computes wrong results does not crash. From then on its replica of the
weights differs, and every later gradient mixes both replicas. A comparison at an interval
limits the number of lost steps. (With a sharded optimizer every update makes the replicas equal
again, so a comparison finds only differences since the last update.)
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
        iteration: step of the gradients.
    """

    def __init__(self, iteration: int, norm: float) -> None:
        super().__init__(
            f"the gradient norm of iteration {iteration} is {norm}: the weights after it are "
            "invalid and were not saved. Continue from the last checkpoint with a lower --lr, "
            "a longer warm-up or --clip-grad (under --fp16 a lower --loss-scale or "
            "--min-loss-scale), or look at the samples of this step and of earlier steps "
            "(mcore-data explain). --no-check-for-nan-in-loss-and-grad disables this check."
        )
        self.iteration = iteration


class HostCopy:
    """Asynchronous copy of a tensor to the host; reading it does not wait for later kernels."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._copied = tensor.detach(), None
        if tensor.is_cuda:
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor


class FiniteGradients:
    """Checks the gradient norm of each step one step later."""

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
        """Check the norm of the previous step, and store the norm of this step.

        Call this before ``Checkpoints.poll``, so that a background save of a step with a bad
        norm is abandoned before it becomes a checkpoint.

        Args:
            iteration: number of this step.
            grad_norm: gradient norm of this step.
            is_skipped: whether the update was skipped, so that any norm is accepted.

        Raises:
            NonFiniteError: on all ranks, if the norm of the previous step is not finite.
        """
        if not self.is_on:
            return
        self.check()
        if isinstance(is_skipped, Tensor):
            grad_norm, is_skipped = torch.where(is_skipped, 0.0, grad_norm), False
        self._iteration = iteration
        self._norm = None if is_skipped else HostCopy(grad_norm)

    def check(self) -> None:
        """Check the last norm, waiting for the device; for saves in the foreground.

        Raises:
            NonFiniteError: on all ranks, if the norm is not finite.
        """
        norm, self._norm = self._norm, None
        if norm is not None and not math.isfinite(value := norm.read().item()):
            raise NonFiniteError(self._iteration, value)


class WeightCopies:
    """Compares the replicas of a run's weights; records the last step with equal replicas."""

    def __init__(self, data_parallel: GradientSync, iteration: int) -> None:
        """Store a step with equal replicas; no communication."""
        self._data_parallel = data_parallel
        self._last_equal = iteration

    def check(self, iteration: int) -> None:
        """Compare the replicas after a step; collective, waits for the device.

        Raises:
            UnlikeWeightsError: on all ranks, if replicas differ, with the tensor and the last
                step with equal replicas.
        """
        try:
            self._data_parallel.check_weights()
        except UnlikeWeightsError as error:
            raise UnlikeWeightsError(
                f"after iteration {iteration}: {error} The copies were equal after iteration "
                f"{self._last_equal}: continue on other hosts from a checkpoint of this step "
                "or an earlier one (--ckpt-step)."
            ) from error
        self._last_equal = iteration
