"""Weight gradients that linears put off, for schedules that split backward in two."""

from collections import deque
from collections.abc import Callable

import torch
from torch import nn

from mcore_parallel.autograd.grad_slot import grad_slot


class WeightQueue:
    """Weight-gradient work that linears put off until ``BACKWARD_WEIGHT``.

    A linear whose weight has the queue (``attach``) computes only the input's gradient in
    backward, returns None for its weight, and puts a function here that adds to
    the weight's main gradient. What is not put off (norms, biases, embedding, head) is done at
    once, and the sums are the same, in the same order.
    """

    def __init__(self) -> None:
        self._work: list[Work] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be done."""
        return not self._work

    def attach(self, *modules: nn.Module) -> None:
        """Become the queue of all weights whose layers can put work off.

        Comes before ``DataParallel``, which learns so when these weights' gradients are
        complete. A weight may be used once in a forward pass.

        Args:
            modules: their layers say what can wait by ``deferrable_weights()``.

        Raises:
            ValueError: if a ``DataParallel`` holds one of the weights already.
        """
        weights = [
            weight
            for module in modules
            for layer in module.modules()
            for weight in getattr(layer, "deferrable_weights", list)()
        ]
        slots = [grad_slot(weight) for weight in weights]
        if any(slot.main is not None for slot in slots):
            raise ValueError(
                "DataParallel would count these weights' gradients as made before they are: "
                "call attach() first, then wrap the model."
            )
        for slot in slots:
            slot.queue = self

    def put(
        self, work: Callable[[], object], prepare: Callable[[], None] | None = None
    ) -> None:
        """Add a function that adds one weight's gradient to it.

        Args:
            work: called once, without gradient.
            prepare: called before it, under the work before: begins what it waits for.
        """
        self._work.append((work, prepare))

    def take(self) -> list["Work"]:
        """Remove and return what came since the last call."""
        work, self._work = self._work, []
        return work


Work = tuple[Callable[[], object], Callable[[], None] | None]
"""A function that makes a weight's gradient, and one that begins what it needs."""


def make_weights(works: list[Work]) -> None:
    """Do what linears put off, each prepared under the one before; empties ``works``."""
    left = deque(works)
    works.clear()  # each lets go of its factors once done
    with torch.no_grad():
        _prepare(left)
        while left:
            work, _ = left.popleft()
            _prepare(left)
            work()


def _prepare(works: deque[Work]) -> None:
    """Begin what the next work waits for."""
    if works and works[0][1] is not None:
        works[0][1]()
