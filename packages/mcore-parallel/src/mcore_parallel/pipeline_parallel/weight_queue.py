"""Deferred weight gradients of linears, for schedules that split backward."""

from collections import deque
from collections.abc import Callable

import torch
from torch import nn

from mcore_parallel.autograd.grad_slot import grad_slot


class WeightQueue:
    """Queue of weight gradients that linears defer until ``BACKWARD_WEIGHT``.

    In backward, a linear whose weight has this queue (``attach``) computes the input's gradient
    only, returns None for the weight, and puts a function into the queue that adds the weight's
    gradient to its main gradient. Gradients of norms, biases, embedding and head are not
    deferred. The sums are the same, in the same order.
    """

    def __init__(self) -> None:
        self._work: list[Work] = []

    @property
    def is_empty(self) -> bool:
        """Whether the queue holds no deferred gradient."""
        return not self._work

    def attach(self, *modules: nn.Module) -> None:
        """Make this the queue of every weight that a layer names in ``deferrable_weights()``.

        Must be called before ``DataParallel``, which then waits for deferred gradients. A
        weight may be used only once in a forward pass.

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
        """Append the computation of one weight's gradient.

        Args:
            work: adds the gradient to the main gradient; called once, under ``no_grad``.
            prepare: launches communication that ``work`` waits for; called before the
                preceding work, so that the two overlap.
        """
        self._work.append((work, prepare))

    def take(self) -> list["Work"]:
        """Remove and return all deferred gradients."""
        work, self._work = self._work, []
        return work


Work = tuple[Callable[[], object], Callable[[], None] | None]
"""A function that computes a weight's gradient, and one that launches what it waits for."""


def make_weights(works: list[Work]) -> None:
    """Compute deferred weight gradients in order; empties ``works``.

    The communication of each gradient overlaps with the computation of the one before.
    """
    remaining = deque(works)
    works.clear()  # so that each function and its factors are freed once called
    with torch.no_grad():
        _prepare_next(remaining)
        while remaining:
            work, _ = remaining.popleft()
            _prepare_next(remaining)
            work()


def _prepare_next(works: deque[Work]) -> None:
    if works and works[0][1] is not None:
        works[0][1]()
