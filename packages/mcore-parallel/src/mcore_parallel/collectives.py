"""Collectives over an ``Axis``: plain ones, and autograd pairs of forward and backward.

Every function returns a new tensor and leaves its input as it is: in-place collectives inside
an autograd.Function silently give zero gradients under ``torch.compile``. Over an axis of one
rank each function returns its input and never calls torch.distributed.

The pairs, forward / backward:
    copy_to            identity        / all-reduce
    reduce_from        all-reduce      / identity
    split_to           own slice       / all-gather
    gather_from        all-gather      / own slice
    gather_partial_from all-gather     / reduce-scatter
    reduce_scatter_to  reduce-scatter  / all-gather
    all_to_all         exchange        / exchange back
The ``start_`` functions begin a plain collective and return at once, for overlap with
computation; ``wait`` gives its result. The ``begin_`` functions do so for pairs with gradients.
Which pair is right depends on what the gradient is on each rank: whole and equal (a replica)
or a part of a sum (partial). Shoeybi et al. 2019, arXiv:1909.08053 (f and g); Korthikanti
et al. 2022, arXiv:2205.05198 (g-bar).
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.launch.call_checks import agree
from mcore_parallel.mesh import SINGLE, Axis

_ops = torch.ops._c10d_functional

OverlapCallback = Callable[[], None] | None
"""Launches other work during a collective, and during the collective of its gradient."""

Cast = Callable[[Tensor], Tensor] | None
"""Applied to what is sent or received, forward only: into bytes and back, for example."""


def all_reduce(x: Shaped[Tensor, "..."], axis: Axis, op: str = "sum") -> Shaped[Tensor, "..."]:
    """Reduce elementwise over ``axis``; no gradient.

    Args:
        x: any shape and dtype of the backend; equal shapes on all ranks.
        axis: ranks that take part; all of them call it.
        op: ``sum``, ``max``, ``min``, ``product`` or ``avg`` (nccl only).
    """
    if axis.size == 1:
        return x
    agree(axis.agreement, f"all_reduce ({op})", x)
    return wait(_ops.all_reduce(x.contiguous(), op, axis.group_name), axis)


def all_gather(x: Shaped[Tensor, "..."], axis: Axis, dim: int = 0) -> Shaped[Tensor, "..."]:
    """Concatenate the ranks' tensors along ``dim`` in axis order; no gradient."""
    if axis.size == 1:
        return x
    return wait(start_all_gather(x.movedim(dim, 0), axis), axis).movedim(0, dim)


def reduce_scatter(x: Shaped[Tensor, "..."], axis: Axis, dim: int = 0) -> Shaped[Tensor, "..."]:
    """Sum over ``axis`` and keep this rank's equal slice of ``dim``; no gradient.

    Raises:
        ValueError: if the axis does not divide ``dim``.
    """
    if axis.size == 1:
        return x
    _check_divides(x, axis, dim)
    return wait(start_reduce_scatter(x.movedim(dim, 0), axis), axis).movedim(0, dim)


def start_all_reduce(x: Shaped[Tensor, "..."], axis: Axis) -> Shaped[Tensor, "..."]:
    """Begin a sum over ``axis``; the result may be read after ``wait``."""
    if axis.size == 1:
        return x
    agree(axis.agreement, "all_reduce (sum)", x)
    return _ops.all_reduce(x.contiguous(), "sum", axis.group_name)


def start_all_gather(x: Shaped[Tensor, "s ..."], axis: Axis) -> Shaped[Tensor, "S ..."]:
    """Begin a concatenation along dimension 0; the result may be read after ``wait``."""
    if axis.size == 1:
        return x
    agree(axis.agreement, "all_gather", x)
    return _ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.group_name)


def start_reduce_scatter(x: Shaped[Tensor, "S ..."], axis: Axis) -> Shaped[Tensor, "s ..."]:
    """Begin a sum that keeps this rank's slice of dimension 0; read it after ``wait``.

    Raises:
        ValueError: if the axis does not divide dimension 0.
    """
    if axis.size == 1:
        return x
    _check_divides(x, axis, 0)
    agree(axis.agreement, "reduce_scatter", x)
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.group_name)


def start_shift(x: Shaped[Tensor, "R ..."], axis: Axis) -> Shaped[Tensor, "R ..."]:
    """Begin to send x to the next rank of the axis, the last to the first.

    The result, what the previous rank sent, may be read after ``wait``; x must not change
    before that. Shapes are equal on all ranks.
    """
    if axis.size == 1:
        return x
    send, receive = [0] * axis.size, [0] * axis.size
    send[(axis.rank + 1) % axis.size] = x.shape[0]
    receive[(axis.rank - 1) % axis.size] = x.shape[0]
    agree(axis.agreement, "shift", x)
    return _ops.all_to_all_single(x.contiguous(), receive, send, axis.group_name)


def start_all_to_all(
    x: Shaped[Tensor, "R ..."], axis: Axis, send: list[int], receive: list[int]
) -> Shaped[Tensor, "Q ..."]:
    """Begin an exchange as ``all_to_all`` does; the result may be read after ``wait``."""
    if axis.size == 1:
        return x
    agree(axis.agreement, "all_to_all", x, any_rows=True)
    return _ops.all_to_all_single(x.contiguous(), receive, send, axis.group_name)


def wait(x: Shaped[Tensor, "..."], axis: Axis = SINGLE) -> Shaped[Tensor, "..."]:
    """Wait for the result of a ``start_`` function and return it; no-op on other tensors.

    Args:
        x: the result.
        axis: whose collective it is: the clock of a recorded step counts the wait as its time.
    """
    clock = axis.clock
    if clock is None or torch.compiler.is_compiling() or not clock.is_on:
        return _ops.wait_tensor(x)
    with clock.span(axis.name):
        return _ops.wait_tensor(x)


def own_slice(x: Shaped[Tensor, "..."], axis: Axis, dim: int = 0) -> Shaped[Tensor, "..."]:
    """Return this rank's equal slice of ``dim`` as a view; no communication.

    Raises:
        ValueError: if the axis does not divide ``dim``.
    """
    if axis.size == 1:
        return x
    _check_divides(x, axis, dim)
    length = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * length, length)


def copy_to(x: Shaped[Tensor, "..."], axis: Axis) -> Shaped[Tensor, "..."]:
    """Pass through; all-reduce the gradient over ``axis`` in backward.

    Use it where a replicated tensor enters computation that is split over the axis.
    """
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from(x: Shaped[Tensor, "..."], axis: Axis) -> Shaped[Tensor, "..."]:
    """All-reduce over ``axis``; pass the gradient through.

    Use it where partial sums become a replicated tensor whose gradient is whole on every rank.
    """
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def split_to(x: Shaped[Tensor, "..."], axis: Axis, dim: int = 0) -> Shaped[Tensor, "..."]:
    """Keep this rank's slice of ``dim``; all-gather the gradient in backward.

    Raises:
        ValueError: if the axis does not divide ``dim``.
    """
    if axis.size == 1:
        return x
    _check_divides(x, axis, dim)
    return _Split.apply(x, axis, dim)


def gather_from(x: Shaped[Tensor, "..."], axis: Axis, dim: int = 0) -> Shaped[Tensor, "..."]:
    """All-gather along ``dim``; keep this rank's slice of the gradient in backward.

    Only right when the gradient of the result is whole and equal on every rank; use
    ``gather_partial_from`` when each rank's gradient is a part of a sum.
    """
    return x if axis.size == 1 else _Gather.apply(x, axis, dim)


def gather_partial_from(
    x: Shaped[Tensor, "..."], axis: Axis, dim: int = 0
) -> Shaped[Tensor, "..."]:
    """All-gather along ``dim``; reduce-scatter the gradient in backward."""
    return x if axis.size == 1 else _GatherPartial.apply(x, axis, dim)


def reduce_scatter_to(
    x: Shaped[Tensor, "..."], axis: Axis, dim: int = 0
) -> Shaped[Tensor, "..."]:
    """Sum over ``axis`` keeping this rank's slice of ``dim``; all-gather the gradient.

    Raises:
        ValueError: if the axis does not divide ``dim``.
    """
    if axis.size == 1:
        return x
    _check_divides(x, axis, dim)
    return _ReduceScatter.apply(x, axis, dim)


def all_to_all(
    x: Shaped[Tensor, "R ..."], axis: Axis, send: list[int], receive: list[int]
) -> Shaped[Tensor, "Q ..."]:
    """Exchange rows: ``send[i]`` rows go to rank ``i``, ``receive[i]`` come from it.

    Backward sends the gradients of the rows back where they came from.

    Args:
        x: rows sorted by destination; ``sum(send)`` of them.
        axis: ranks that take part.
        send: rows for each rank of the axis; may hold zeros.
        receive: rows from each rank: this rank's entry of each other rank's ``send``.
    """
    return x if axis.size == 1 else _AllToAll.apply(x, axis, send, receive)


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
        axis: Axis,
        decode: Cast = None,
        overlap_callback: OverlapCallback = None,
    ) -> None:
        """Begin the collective.

        Args:
            x: its input.
            begin: a ``start_`` function.
            begin_backward: the ``start_`` function of the gradient.
            axis: over which both communicate.
            decode: from the received tensor to the result; None: the same tensor.
            overlap_callback: called during the collective, and during that of the gradient.
        """
        self._x = _Begin.apply(x, overlap_callback, axis)
        self._received = begin(self._x.detach())
        self._begin_backward, self._axis, self._decode = begin_backward, axis, decode
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
        return _Wait.apply(
            self._x, self._received, self._begin_backward, self._axis, self._decode
        )


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
        axis,
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
        axis,
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
        axis,
        decode,
        overlap_callback,
    )


def _check_divides(x: Tensor, axis: Axis, dim: int) -> None:
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"dimension {dim} of size {x.shape[dim]} does not divide over axis "
            f"{axis.name} of {axis.size} ranks"
        )


class _Copy(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, ctx.axis), None


class _Reduce(OnceDifferentiable):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Split(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return own_slice(x, axis, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_gather(grad, ctx.axis, ctx.dim), None, None


class _Gather(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return own_slice(grad, ctx.axis, ctx.dim).contiguous(), None, None


class _GatherPartial(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce_scatter(grad, ctx.axis, ctx.dim), None, None


class _ReduceScatter(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_gather(grad, ctx.axis, ctx.dim), None, None


class _AllToAll(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return wait(start_all_to_all(x, axis, send, receive), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = start_all_to_all(grad, ctx.axis, ctx.receive, ctx.send)
        return wait(grad, ctx.axis), None, None, None


class _Begin(OnceDifferentiable):
    """Identity; backward waits for the collective of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, overlap_callback: Any, axis: Axis) -> Tensor:
        ctx.overlap_callback, ctx.axis = overlap_callback, axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.overlap_callback is not None:
            ctx.overlap_callback()
        return wait(grad, ctx.axis), None, None


class _Wait(OnceDifferentiable):
    """Waits for the result; backward begins the collective of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, _x: Tensor, received: Tensor, begin_backward: Any, axis: Axis, decode: Any
    ) -> Tensor:
        ctx.begin_backward = begin_backward
        received = wait(received, axis)
        return received if decode is None else decode(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.begin_backward(grad), None, None, None, None
