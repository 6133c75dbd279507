"""The interface of a dispatcher, which sends tokens to their experts and the results back.

``Dispatcher.run`` is the complete exchange: dispatch, experts, combine. A dispatcher that can
bound the number of rows, or overlap its exchanges with the experts, overrides ``run`` by a loop
over parts of the rows. Dispatch returns tokens and a plan of the order in which the experts
read the tokens, not sorted rows: a GEMM that gathers its rows then needs no copy of the tokens.
The state between ``dispatch`` and ``combine`` is in a handle, so that several micro-batches may
be dispatched before the first one is combined.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mcore_moe.dispatch.permutation import RowPlan
from mcore_moe.routing.topk import Routing
from mcore_parallel.collectives import CollectiveHandle, OverlapCallback

RunExperts = Callable[[Tensor, Tensor, RowPlan], Tensor]
"""``Experts``, or a function with the same arguments: tokens, weights of choices, plan."""
Overlap = Callable[[], object]
"""Launches work that does not read the tokens while they are exchanged."""


@dataclass(frozen=True, slots=True)
class DispatchedTokens:
    """The input of this rank's experts."""

    x: Float[Tensor, "M D"]
    """Tokens of this rank, or rows received from other ranks."""
    probs: Float[Tensor, "M k"]
    """Weight of each choice."""
    plan: RowPlan
    """The expert of each choice, and the order of the rows."""
    handle: Any
    """State for ``combine`` of the same dispatcher."""


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """Options of one exchange of tokens."""

    equal_tokens: bool = False
    """Whether all ranks have equally many tokens, so that ``AllGatherDispatcher`` and
    ``SymmetricDispatcher`` need not exchange numbers of tokens."""
    in_flight: CollectiveHandle | None = None
    """The result of ``Dispatcher.begin`` for these tokens; None: nothing has been sent yet."""
    overlap: Overlap | None = None
    """Called while the tokens are exchanged: once, or not at all."""


DEFAULT_OPTIONS = DispatchOptions()
"""Any number of tokens, nothing sent yet, no overlap."""


class Dispatcher(ABC):
    """Sends tokens to the ranks of their experts and returns the results."""

    def begin(
        self,
        x: Float[Tensor, "T D"],  # noqa: ARG002
        *,
        equal_tokens: bool = False,  # noqa: ARG002
    ) -> CollectiveHandle | None:
        """Begin an exchange that does not depend on routing; return its handle or None.

        Args:
            x: this rank's tokens.
            equal_tokens: see ``DispatchOptions``.
        """
        return None

    def run(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        experts: RunExperts,
        options: DispatchOptions = DEFAULT_OPTIONS,
    ) -> Float[Tensor, "T D"]:
        """Dispatch tokens, run the experts, and return the weighted sum of outputs by token.

        Args:
            x: this rank's tokens.
            routing: experts and weights of these tokens.
            experts: this rank's experts.
            options: of the exchange.
        """
        dispatched = self.dispatch(x, routing, options)
        y = experts(dispatched.x, dispatched.probs, dispatched.plan)
        return self.combine(y, dispatched.handle)

    @abstractmethod
    def dispatch(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        options: DispatchOptions = DEFAULT_OPTIONS,
    ) -> DispatchedTokens:
        """Exchange tokens and weights, and return the input of this rank's experts."""

    @abstractmethod
    def combine(self, y: Float[Tensor, "M D"], handle: Any) -> Float[Tensor, "T D"]:
        """Return the experts' outputs to the ranks of their tokens and sum them by token.

        Args:
            y: one sum for each row of ``DispatchedTokens.x``.
            handle: ``DispatchedTokens.handle``.
        """

    def set_overlap_callback(self, callback: OverlapCallback) -> None:  # noqa: B027
        """Set the function that is called while rows, sums or their gradients are exchanged.

        Ignored by dispatchers whose exchanges the host does not launch asynchronously.
        """
