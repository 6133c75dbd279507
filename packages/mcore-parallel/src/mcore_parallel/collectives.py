"""Collectives over an ``Axis``: plain ones, and pairs with a collective in backward.

Every function returns a new tensor and does not change its input: in-place collectives inside
an autograd.Function silently give zero gradients under ``torch.compile``. Over an axis of one
rank each function returns its input and does not call torch.distributed.

The pairs, forward / backward:
    copy_to            identity        / all-reduce
    reduce_from        all-reduce      / identity
    split_to           own slice       / all-gather
    gather_from        all-gather      / own slice
    gather_partial_from all-gather     / reduce-scatter
    reduce_scatter_to  reduce-scatter  / all-gather
    all_to_all         exchange        / exchange back
The ``start_`` functions launch a plain collective and return at once, so that computation can
overlap; ``wait`` completes it. The ``begin_`` functions launch a pair, gradients included.
Which pair is right depends on the gradient of the result on each rank: equal on all ranks (a
replica), or one term of a sum over the ranks (partial). Shoeybi et al. 2019, arXiv:1909.08053
(f and g); Korthikanti et al. 2022, arXiv:2205.05198 (g-bar).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.launch.call_checks import agree
from mcore_parallel.mesh import SINGLE, Axis

_ops = torch.ops._c10d_functional

OverlapCallback = Callable[[], None] | None
"""Launches other work during a collective, and during the collective of its gradient."""

Cast = Callable[[Tensor], Tensor] | None
"""Encodes the sent tensor or decodes the received one, in forward only: to fp8, for example."""


def all_reduce(x: Shaped[Tensor, "..."], axis: Axis, op: str = "sum") -> Shaped[Tensor, "..."]:
    """Reduce elementwise over ``axis``; no gradient.

    Args:
        x: any shape and dtype of the backend; equal shapes on all ranks.
        axis: ranks that take part.
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
    """Sum over ``axis`` and return this rank's equal slice of ``dim``; no gradient.

    Raises:
        ValueError: if the axis does not divide ``dim``.
    """
    if axis.size == 1:
        return x
    _check_divides(x, axis, dim)
    return wait(start_reduce_scatter(x.movedim(dim, 0), axis), axis).movedim(0, dim)


def gather_bytes(content: bytes, axis: Axis) -> list[bytes]:
    """Collect the bytes of each rank, of any length, in axis order; all-gathers twice."""
    if axis.size == 1:
        return [content]
    device = host_device(axis)
    sizes = all_gather(torch.tensor([len(content)], device=device), axis).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    rows = all_gather(padded.to(device), axis).cpu().view(axis.size, -1)
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def host_device(axis: Axis) -> torch.device:
    """Return the device for small tensors in collectives: the host if the group has gloo."""
    if axis.size == 1 or "cpu" in str(dist.get_backend_config(axis.group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def start_all_reduce(x: Shaped[Tensor, "..."], axis: Axis) -> Shaped[Tensor, "..."]:
    """Launch a sum over ``axis``; the result may be read after ``wait``."""
    if axis.size == 1:
        return x
    agree(axis.agreement, "all_reduce (sum)", x)
    return _ops.all_reduce(x.contiguous(), "sum", axis.group_name)


def start_all_gather(x: Shaped[Tensor, "s ..."], axis: Axis) -> Shaped[Tensor, "S ..."]:
    """Launch an all-gather along dimension 0; the result may be read after ``wait``."""
    if axis.size == 1:
        return x
    agree(axis.agreement, "all_gather", x)
    return _ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.group_name)


def start_reduce_scatter(x: Shaped[Tensor, "S ..."], axis: Axis) -> Shaped[Tensor, "s ..."]:
    """Launch a reduce-scatter along dimension 0; the result may be read after ``wait``.

    Raises:
        ValueError: if the axis does not divide dimension 0.
    """
    if axis.size == 1:
        return x
    _check_divides(x, axis, 0)
    agree(axis.agreement, "reduce_scatter", x)
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.group_name)


def start_shift(x: Shaped[Tensor, "R ..."], axis: Axis) -> Shaped[Tensor, "R ..."]:
    """Launch a send of x to the next rank, and return the previous rank's x, cyclically.

    The result may be read after ``wait``; x must not change before. Shapes are equal on all
    ranks.
    """
    if axis.size == 1:
        return x
    # An all-to-all in which every rank has rows for one other rank only.
    send, receive = [0] * axis.size, [0] * axis.size
    send[(axis.rank + 1) % axis.size] = x.shape[0]
    receive[(axis.rank - 1) % axis.size] = x.shape[0]
    agree(axis.agreement, "shift", x)
    return _ops.all_to_all_single(x.contiguous(), receive, send, axis.group_name)


def start_all_to_all(
    x: Shaped[Tensor, "R ..."], axis: Axis, send: list[int], receive: list[int]
) -> Shaped[Tensor, "Q ..."]:
    """Launch the exchange of ``all_to_all``; the result may be read after ``wait``."""
    if axis.size == 1:
        return x
    agree(axis.agreement, "all_to_all", x, any_rows=True)
    return _ops.all_to_all_single(x.contiguous(), receive, send, axis.group_name)


def wait(x: Shaped[Tensor, "..."], axis: Axis = SINGLE) -> Shaped[Tensor, "..."]:
    """Wait until the result of a ``start_`` function is complete, and return the result.

    Returns any other tensor unchanged.

    Args:
        x: result of a ``start_`` function.
        axis: axis of the collective, to which the clock of a recorded step attributes the wait.
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
    """Return x; all-reduce the gradient over ``axis`` in backward.

    For a replicated tensor that enters a computation split over the axis.
    """
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from(x: Shaped[Tensor, "..."], axis: Axis) -> Shaped[Tensor, "..."]:
    """All-reduce x over ``axis``; return the gradient unchanged in backward.

    For partial sums that become a replicated tensor, whose gradient is equal on every rank.
    """
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def split_to(x: Shaped[Tensor, "..."], axis: Axis, dim: int = 0) -> Shaped[Tensor, "..."]:
    """Return this rank's slice of ``dim``; all-gather the gradient in backward.

    Raises:
        ValueError: if the axis does not divide ``dim``.
    """
    if axis.size == 1:
        return x
    _check_divides(x, axis, dim)
    return _Split.apply(x, axis, dim)


def gather_from(x: Shaped[Tensor, "..."], axis: Axis, dim: int = 0) -> Shaped[Tensor, "..."]:
    """All-gather along ``dim``; take this rank's slice of the gradient in backward.

    Only right if every rank has the full, equal gradient of the result; use
    ``gather_partial_from`` if each rank's gradient is one term of a sum.
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
    """Reduce-scatter along ``dim``; all-gather the gradient in backward.

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
    """Exchange rows: ``send[i]`` rows go to rank ``i``, ``receive[i]`` come from rank ``i``.

    Backward returns the gradient of each row to the rank that sent the row.

    Args:
        x: rows sorted by destination; ``sum(send)`` of them.
        axis: ranks that take part.
        send: rows for each rank of the axis; may hold zeros.
        receive: rows from each rank, equal to this rank's entry of that rank's ``send``.
    """
    return x if axis.size == 1 else _AllToAll.apply(x, axis, send, receive)


class CollectiveHandle:
    """A launched collective with a gradient; ``wait`` returns the result.

    In backward the autograd node of ``wait`` launches the collective of the gradient, and the
    node of ``__init__`` waits for it, so operations between the two calls overlap with the
    collective in both directions. The overlap callback is called before either wait.
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
        """Launch the collective of x.

        Args:
            x: input of the collective.
            begin: launches the collective (a ``start_`` function).
            begin_backward: launches the collective of the gradient.
            axis: axis over which both collectives communicate.
            decode: converts the received tensor to the result; None: no conversion.
            overlap_callback: called during the collective, and again during the collective of
                the gradient.
        """
        self._x = _Begin.apply(x, overlap_callback, axis)
        self._received = begin(self._x.detach())
        self._begin_backward, self._axis, self._decode = begin_backward, axis, decode
        self._overlap_callback = overlap_callback

    def run_overlap_callback(self) -> None:
        """Call the overlap callback now instead of in ``wait``."""
        overlap_callback, self._overlap_callback = self._overlap_callback, None
        # Inside backward (graph task id != -1) this is a recomputed forward. It makes no call:
        # the collectives of the gradients do, and all ranks must make equally many calls.
        if overlap_callback is not None and torch._C._current_graph_task_id() == -1:
            overlap_callback()

    def wait(self) -> Shaped[Tensor, "..."]:
        """Complete the collective and return its result; may be called once."""
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
    """Launch ``gather_partial_from`` along dimension 0."""
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
    """Launch ``reduce_scatter_to`` along dimension 0."""
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
    """Launch ``all_to_all``."""
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
            f"{axis.name} of {axis.size} ranks: it must be a multiple of {axis.size}"
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
    """Identity in forward; backward waits for the gradient's collective."""

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
    """Waits for the result in forward; backward launches the gradient's collective."""

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
