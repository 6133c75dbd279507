"""Autograd pairs of collectives that begin early and land late, under other work.

The ``begin_`` functions do what their pairs in ``collectives`` do, over several ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from mcore_parallel.autograd_functions import OnceDifferentiable
from mcore_parallel.collectives import (
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
    wait,
)
from mcore_parallel.mesh import Axis

Meanwhile = Callable[[], None] | None
"""Launches other work while a collective travels, and while that of the gradient does."""
Change = Callable[[Tensor], Tensor] | None
"""Of what travels, forward only: into bytes and out of them, say."""


class InFlight:
    """A collective of a pair that has begun: launch other work, then ``land``.

    In backward ``land`` begins the collective of the gradient, and operations that were
    launched in between run theirs before it is waited for. What ``meanwhile`` names runs before
    either is waited for.
    """

    def __init__(
        self,
        x: Shaped[Tensor, "..."],
        begin: Callable[[Tensor], Tensor],
        begin_back: Callable[[Tensor], Tensor],
        decode: Change = None,
        meanwhile: Meanwhile = None,
    ) -> None:
        """Begin.

        Args:
            x: what the collective takes.
            begin: a ``start_`` function.
            begin_back: that of the gradient.
            decode: from what ``begin`` gave, once it is there, to the result; None: the same.
            meanwhile: called while the collective travels, and while that of the gradient does.
        """
        self._x = _Depart.apply(x, meanwhile)
        self._result = begin(self._x.detach())
        self._begin_back, self._decode = begin_back, decode
        self._meanwhile = meanwhile

    def pause(self) -> None:
        """Call ``meanwhile`` now instead of in ``land``."""
        meanwhile, self._meanwhile = self._meanwhile, None
        # In a backward that repeats a forward, the gradients' collectives have pauses.
        if meanwhile is not None and torch._C._current_graph_task_id() == -1:
            meanwhile()

    def land(self) -> Shaped[Tensor, "..."]:
        """Wait for the result and return it; once."""
        self.pause()
        return _Land.apply(self._x, self._result, self._begin_back, self._decode)


def begin_gather_partial(
    x: Shaped[Tensor, "s ..."],
    axis: Axis,
    meanwhile: Meanwhile = None,
    *,
    encode: Change = None,
    decode: Change = None,
) -> InFlight:
    """Begin ``gather_partial_from`` along dimension 0."""
    return InFlight(
        x,
        lambda x: start_all_gather(x if encode is None else encode(x), axis),
        lambda grad: start_reduce_scatter(grad, axis),
        decode,
        meanwhile,
    )


def begin_reduce_scatter(
    x: Shaped[Tensor, "S ..."], axis: Axis, meanwhile: Meanwhile = None
) -> InFlight:
    """Begin ``reduce_scatter_to`` along dimension 0."""
    return InFlight(
        x,
        lambda x: start_reduce_scatter(x, axis),
        lambda grad: start_all_gather(grad, axis),
        meanwhile=meanwhile,
    )


def begin_all_to_all(
    x: Shaped[Tensor, "R ..."],
    axis: Axis,
    send: list[int],
    receive: list[int],
    meanwhile: Meanwhile = None,
    *,
    encode: Change = None,
    decode: Change = None,
) -> InFlight:
    """Begin ``all_to_all``."""
    return InFlight(
        x,
        lambda x: start_all_to_all(x if encode is None else encode(x), axis, send, receive),
        lambda grad: start_all_to_all(grad, axis, receive, send),
        decode,
        meanwhile,
    )


class _Depart(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, meanwhile: Any) -> Tensor:
        ctx.meanwhile = meanwhile
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.meanwhile is not None:
            ctx.meanwhile()
        return wait(grad), None


class _Land(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, _x: Tensor, result: Tensor, begin_back: Any, decode: Any) -> Tensor:
        ctx.begin_back = begin_back
        return wait(result) if decode is None else decode(wait(result))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.begin_back(grad), None, None, None
