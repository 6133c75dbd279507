"""Autograd pairs of collectives that run asynchronously: begin, launch other work, wait.

The ``begin_`` functions compute what their pairs in ``collectives`` compute, over several
ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.collectives import (
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
    wait,
)
from mcore_parallel.mesh import Axis

OverlapCallback = Callable[[], None] | None
"""Launches other work during a collective, and during the collective of its gradient."""
Cast = Callable[[Tensor], Tensor] | None
"""Applied to what is sent or received, forward only: into bytes and back, for example."""


class CollectiveHandle:
    """A collective that has begun: launch other work, then ``wait`` for its result.

    In backward the node of ``wait`` begins the collective of the gradient, and the node of
    ``__init__`` waits for it: operations that forward launched between the two run their
    backward during that collective. The overlap callback is called before either wait.
    """

    def __init__(
        self,
        x: Shaped[Tensor, "..."],
        begin: Callable[[Tensor], Tensor],
        begin_backward: Callable[[Tensor], Tensor],
        decode: Cast = None,
        overlap_callback: OverlapCallback = None,
    ) -> None:
        """Begin the collective.

        Args:
            x: its input.
            begin: a ``start_`` function.
            begin_backward: the ``start_`` function of the gradient.
            decode: from the received tensor to the result; None: the same tensor.
            overlap_callback: called during the collective, and during that of the gradient.
        """
        self._x = _Begin.apply(x, overlap_callback)
        self._received = begin(self._x.detach())
        self._begin_backward, self._decode = begin_backward, decode
        self._overlap_callback = overlap_callback

    def run_overlap_callback(self) -> None:
        """Call the overlap callback now instead of in ``wait``."""
        overlap_callback, self._overlap_callback = self._overlap_callback, None
        # A forward that backward repeats does not call back: the collectives of the gradients
        # do, and all ranks must call back equally often.
        if overlap_callback is not None and torch._C._current_graph_task_id() == -1:
            overlap_callback()

    def wait(self) -> Shaped[Tensor, "..."]:
        """Wait for the result and return it; call it once."""
        self.run_overlap_callback()
        return _Wait.apply(self._x, self._received, self._begin_backward, self._decode)


def begin_gather_partial(
    x: Shaped[Tensor, "s ..."],
    axis: Axis,
    overlap_callback: OverlapCallback = None,
    *,
    encode: Cast = None,
    decode: Cast = None,
) -> CollectiveHandle:
    """Begin ``gather_partial_from`` along dimension 0."""
    return CollectiveHandle(
        x,
        lambda x: start_all_gather(x if encode is None else encode(x), axis),
        lambda grad: start_reduce_scatter(grad, axis),
        decode,
        overlap_callback,
    )


def begin_reduce_scatter(
    x: Shaped[Tensor, "S ..."], axis: Axis, overlap_callback: OverlapCallback = None
) -> CollectiveHandle:
    """Begin ``reduce_scatter_to`` along dimension 0."""
    return CollectiveHandle(
        x,
        lambda x: start_reduce_scatter(x, axis),
        lambda grad: start_all_gather(grad, axis),
        overlap_callback=overlap_callback,
    )


def begin_all_to_all(
    x: Shaped[Tensor, "R ..."],
    axis: Axis,
    send: list[int],
    receive: list[int],
    overlap_callback: OverlapCallback = None,
    *,
    encode: Cast = None,
    decode: Cast = None,
) -> CollectiveHandle:
    """Begin ``all_to_all``."""
    return CollectiveHandle(
        x,
        lambda x: start_all_to_all(x if encode is None else encode(x), axis, send, receive),
        lambda grad: start_all_to_all(grad, axis, receive, send),
        decode,
        overlap_callback,
    )


class _Begin(OnceDifferentiable):
    """Identity; backward waits for the collective of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, overlap_callback: Any) -> Tensor:
        ctx.overlap_callback = overlap_callback
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.overlap_callback is not None:
            ctx.overlap_callback()
        return wait(grad), None


class _Wait(OnceDifferentiable):
    """Waits for the result; backward begins the collective of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, _x: Tensor, received: Tensor, begin_backward: Any, decode: Any
    ) -> Tensor:
        ctx.begin_backward = begin_backward
        return wait(received) if decode is None else decode(wait(received))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.begin_backward(grad), None, None, None
