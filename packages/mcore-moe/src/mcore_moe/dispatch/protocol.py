"""What a dispatcher is: ``dispatch`` brings what a rank's experts need, ``combine`` their sums.

A dispatcher gives tokens and a plan of the order in which the experts need them. The experts
follow the plan, so that a GEMM that gathers its rows needs no copy of them. A handle carries
the state from one method to the other, so a dispatcher has none and several micro-batches may
be in flight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from mcore_moe.dispatch.permutation import RowPlan
from mcore_moe.routing.topk import Routing
from mcore_parallel.async_collectives import InFlight

Overlap = Callable[[], object]
"""Launches work that does not need the tokens which travel meanwhile."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What this rank's experts compute."""

    x: Float[Tensor, "M D"]
    """Tokens of this rank, or rows that came from others."""
    probs: Float[Tensor, "M k"]
    """Weight of each choice."""
    plan: RowPlan
    """Which expert computes which of them, in which order."""
    handle: Any
    """State for ``combine`` of the same dispatcher."""


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """What is known of tokens that are dispatched, and what overlaps with that."""

    equal_tokens: bool = False
    """Whether all ranks bring equally many tokens, so that none has to say how many;
    ``AllGatherDispatcher`` and ``SymmetricDispatcher`` read it."""
    in_flight: InFlight | None = None
    """What ``Dispatcher.begin`` returned for them; None: none of them travels yet."""
    overlap: Overlap | None = None
    """Called once, or not at all, while they travel."""


DEFAULT_OPTIONS = DispatchOptions()
"""Any numbers of tokens, none of which travels yet, and nothing that overlaps."""


@runtime_checkable
class Dispatcher(Protocol):
    """Sends tokens to the ranks of their experts and returns the results."""

    def begin(
        self,
        x: Float[Tensor, "T D"],  # noqa: ARG002
        *,
        equal_tokens: bool = False,  # noqa: ARG002
    ) -> InFlight | None:
        """Begin to send what travels wherever it is routed; None, as here: nothing does."""
        return None

    def dispatch(
        self,
        x: Float[Tensor, "T D"],
        routing: Routing,
        options: DispatchOptions = DEFAULT_OPTIONS,
    ) -> Dispatched:
        """Collect what this rank's experts compute, of its tokens and their routing."""

    def combine(self, y: Float[Tensor, "M D"], handle: Any) -> Float[Tensor, "T D"]:
        """Return the experts' sums to the ranks of their tokens and add them up by token.

        Args:
            y: one sum for each row of ``Dispatched.x``.
            handle: of that.
        """
