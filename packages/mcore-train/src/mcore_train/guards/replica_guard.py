"""Ending a run whose copies of weights came apart: something computes or stores wrongly.

A GPU that is wrong once in a while crashes nothing: its copy of the weights is another from
then on, and every later gradient a mixture. Copies that are compared now and then bound what
is lost. (With a sharded optimizer every update makes the copies equal again, so only what
went wrong with them since is seen.)
"""

from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.data_parallel.replica_checks import UnlikeWeightsError


class WeightCopies:
    """Compares the copies of a run's weights, and records when they were equal last."""

    def __init__(self, data_parallel: GradientSync, iteration: int) -> None:
        """Begin at a step whose copies are equal; no communication."""
        self._data_parallel = data_parallel
        self._equal = iteration

    def check(self, iteration: int) -> None:
        """Compare after a step; all ranks call it, and wait for their devices.

        Raises:
            UnlikeWeightsError: on all ranks, if copies differ: says which, and which
                checkpoints hold none of it.
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
