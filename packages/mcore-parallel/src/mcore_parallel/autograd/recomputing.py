"""Activation recomputation: free what a function saved, and run it again in backward.

``recompute`` saves a function's inputs instead of its intermediate results; the inputs may be
sharded over the tensor ranks. ``recompute_between`` frees a tensor that one part computes
cheaply and the next one saves, such as the output of a norm or an activation.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeGuard

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mcore_parallel.autograd.functions import same_autocast
from mcore_parallel.collectives import all_gather, own_slice
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.rng import RngStreams


def recompute(
    function: Callable[..., Any],
    *args: object,
    streams: RngStreams | None = None,
    shared_by: Axis = SINGLE,
) -> Any:
    """Call a function, save its inputs only, and run it again in backward.

    The second run draws the same random numbers as the first, from the default generators and
    from every named stream; it leaves their states unchanged. Where a CUDA graph is recorded
    no state can be read: there the function must draw nothing. Collectives inside the function
    run again too, on every rank alike.

    Args:
        function: of tensors; must not depend on anything that changes before backward.
        args: passed to the function; gradients flow to those that require one.
        streams: named streams that the function may draw from.
        shared_by: ranks that all hold the same inputs: each saves a shard of every tensor
            that requires a gradient and divides evenly, and all-gathers it in backward.

    Returns:
        What the function returns.

    Reference:
        Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost. arXiv:1604.06174;
        sharded inputs: Rajbhandari et al. 2019, ZeRO, arXiv:1910.02054 (partitioned activation
        checkpointing).
    """
    again = nullcontext() if streams is None or _is_recorded() else _Replay(streams)
    kept = [_ShardedInput(arg, shared_by) if _can_cut(arg, shared_by) else arg for arg in args]
    sharded = [arg for arg in kept if isinstance(arg, _ShardedInput)]
    if not sharded:
        return _again(function, args, again)

    def run(_of_the_device: Tensor, *args: object) -> Any:
        return function(*(a.whole() if isinstance(a, _ShardedInput) else a for a in args))

    # The empty tensor shows torch which device's generators to save.
    result = _again(run, (sharded[0].whole().new_empty(0), *kept), again)
    for arg in sharded:
        arg.cut()
    return result


def recompute_between(
    producer: Callable[[Tensor], Tensor],
    consumer: Callable[[Tensor], Any],
    x: Shaped[Tensor, "..."],
    *,
    streams: RngStreams | None = None,
) -> Any:
    """Return ``consumer(producer(x))``, saving x in place of the producer's output.

    The producer's output is freed once the consumer returns, unless other code holds it. The
    first operation of backward that needs it runs the producer again, without gradient; the
    last one frees it again.

    Args:
        producer: from one contiguous tensor to another; cheap, no communication.
        consumer: may save its argument, or views of it.
        x: saved until backward, which the producer does anyway.
        streams: named streams that the producer may draw from.
    """
    between = _RecomputedTensor(producer, x, None if streams is None else _Replay(streams))
    y = producer(x)
    if not y.requires_grad:
        return consumer(y)
    between.look_at(y)
    with saved_tensors_hooks(between.pack, between.unpack):
        return consumer(y)


def _again(function: Callable[..., Any], args: tuple[object, ...], replay: Any) -> Any:
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), replay),
        preserve_rng_state=not _is_recorded(),
    )


def _is_recorded() -> bool:
    """Whether a CUDA graph is recorded of what runs now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _ShardedInput:
    """An input of a recomputed function, of which this rank saves one shard."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self.axis, self.shape = axis, x.shape
        self.x: Tensor | None = x
        self.part: Tensor | None = None

    def whole(self) -> Tensor:
        """Return the input itself, or after ``cut`` the one gathered from all ranks."""
        if self.x is not None:
            return self.x
        assert self.part is not None
        return all_gather(self.part, self.axis).view(self.shape).requires_grad_()

    def cut(self) -> None:
        """Keep this rank's shard only."""
        assert self.x is not None
        self.part = own_slice(self.x.detach().reshape(-1), self.axis).clone()
        self.x = None


def _can_cut(x: object, axis: Axis) -> TypeGuard[Tensor]:
    if not isinstance(x, Tensor) or axis.size == 1:
        return False
    return x.requires_grad and torch.is_grad_enabled() and x.numel() % axis.size == 0


class _RecomputedTensor:
    """The tensor between producer and consumer, recomputed once for all that saved it.

    ``pack`` replaces every saved view of the tensor by the view's geometry and counts it;
    ``unpack`` recreates the view from a tensor that the first call recomputes.
    """

    def __init__(
        self, producer: Callable[[Tensor], Tensor], x: Tensor, replay: "_Replay | None"
    ) -> None:
        self.producer, self.x, self.replay = producer, x.detach(), replay or nullcontext()
        self.num_savers = self.num_served = 0
        self.made: Tensor | None = None  # between the first and the last unpack of a backward
        self.autocast = same_autocast(x.device)

    def look_at(self, y: Tensor) -> None:
        """Record what identifies the tensor (storage, shape, strides) without a reference."""
        self.shape, self.stride, self.dtype = y.shape, y.stride(), y.dtype
        self.storage = y.untyped_storage().data_ptr()

    def pack(self, saved: Tensor) -> Any:
        """Replace a saved tensor by its geometry, if it is a view of the recomputed one."""
        if saved.untyped_storage().data_ptr() != self.storage or saved.dtype != self.dtype:
            return saved
        self.num_savers += 1
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """Return what autograd saved, recomputed if ``pack`` replaced it."""
        if isinstance(packed, Tensor):
            return packed
        return self.again().as_strided(*packed)

    def again(self) -> Tensor:
        """Return the tensor, recomputed by the first caller and freed by the last one."""
        made = self.made
        if made is None:
            with torch.no_grad(), self.autocast, self.replay:
                made = self.producer(self.x)
            assert made.shape == self.shape
            assert made.stride() == self.stride
        # Modulo: a second backward (retain_graph) begins again at 0.
        self.num_served = (self.num_served + 1) % self.num_savers
        self.made = made if self.num_served else None
        return made


class _Replay:
    """A context that resets the streams to their state at construction, and restores them.

    Entered once for each backward pass through the function (several with ``retain_graph``).
    """

    def __init__(self, streams: RngStreams) -> None:
        self.streams = streams
        self.before = streams.state()
        self.outside: Mapping[str, Tensor] = {}

    def __enter__(self) -> None:
        self.outside = self.streams.state()
        self.streams.set_state(self.before)

    def __exit__(self, *exception: object) -> None:
        self.streams.set_state(self.outside)
