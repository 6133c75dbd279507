"""Activation recomputation: save less in forward, and compute again in backward.

``recompute`` saves a function's inputs instead of its intermediate results; the inputs may be
sharded over the tensor ranks. ``recompute_between`` frees one tensor that is cheap to compute
and that the next operation saves, such as the output of a norm or an activation.
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
    """Return ``function(*args)``, saving its inputs only; backward runs the function again.

    The second run draws the same random numbers as the first, from the default generators and
    from every named stream, and does not change their states. While a CUDA graph is captured,
    generator states cannot be read: the function must draw no random numbers then. Collectives
    inside the function run again too, on every rank.

    Args:
        function: must not depend on state that changes before backward.
        args: arguments of the function; gradients flow to tensors that require one.
        streams: named streams that the function may draw from.
        shared_by: ranks with equal inputs: each saves a shard of every tensor that requires a
            gradient and divides evenly, and all-gathers the tensor in backward.

    Reference:
        Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost. arXiv:1604.06174;
        sharded inputs: Rajbhandari et al. 2019, ZeRO, arXiv:1910.02054 (partitioned activation
        checkpointing).
    """
    replay = nullcontext() if streams is None or _is_capturing() else _Replay(streams)
    inputs = [
        _ShardedInput(arg, shared_by) if _can_shard(arg, shared_by) else arg for arg in args
    ]
    sharded = [arg for arg in inputs if isinstance(arg, _ShardedInput)]
    if not sharded:
        return _checkpointed(function, args, replay)

    def run(_device_marker: Tensor, *args: object) -> Any:
        return function(*(a.full() if isinstance(a, _ShardedInput) else a for a in args))

    # torch saves the generator states of the devices of tensor arguments: an empty tensor names
    # the device, since a _ShardedInput is no tensor.
    result = _checkpointed(run, (sharded[0].full().new_empty(0), *inputs), replay)
    for arg in sharded:
        arg.shard()
    return result


def recompute_between(
    producer: Callable[[Tensor], Tensor],
    consumer: Callable[[Tensor], Any],
    x: Shaped[Tensor, "..."],
    *,
    streams: RngStreams | None = None,
) -> Any:
    """Return ``consumer(producer(x))``, saving x instead of the producer's output.

    The producer's output is freed once the consumer returns, unless other code holds it. In
    backward the first operation that needs the output runs the producer again, without
    gradient; the last operation frees the output again.

    Args:
        producer: maps a contiguous tensor to a contiguous tensor; cheap, no communication.
        consumer: may save its argument, or views of the argument.
        x: saved until backward, as the producer's own backward requires anyway.
        streams: named streams that the producer may draw from.
    """
    recomputed = _RecomputedTensor(producer, x, None if streams is None else _Replay(streams))
    y = producer(x)
    if not y.requires_grad:
        return consumer(y)
    recomputed.identify(y)
    with saved_tensors_hooks(recomputed.pack, recomputed.unpack):
        return consumer(y)


def _checkpointed(function: Callable[..., Any], args: tuple[object, ...], replay: Any) -> Any:
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), replay),  # (for forward, for the second run)
        preserve_rng_state=not _is_capturing(),
    )


def _is_capturing() -> bool:
    """Whether the current stream is being captured in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _ShardedInput:
    """An input of a recomputed function, of which this rank saves one shard."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self.axis, self.shape = axis, x.shape
        self.x: Tensor | None = x
        self.part: Tensor | None = None

    def full(self) -> Tensor:
        """Return the input, all-gathered from the shards if ``shard`` was called."""
        if self.x is not None:
            return self.x
        assert self.part is not None
        return all_gather(self.part, self.axis).view(self.shape).requires_grad_()

    def shard(self) -> None:
        """Keep this rank's shard and free the input."""
        assert self.x is not None
        self.part = own_slice(self.x.detach().reshape(-1), self.axis).clone()
        self.x = None


def _can_shard(x: object, axis: Axis) -> TypeGuard[Tensor]:
    if not isinstance(x, Tensor) or axis.size == 1:
        return False
    return x.requires_grad and torch.is_grad_enabled() and x.numel() % axis.size == 0


class _RecomputedTensor:
    """The tensor between producer and consumer, recomputed once per backward.

    ``pack`` replaces every saved view of the tensor by the view's geometry, and counts these
    views. ``unpack`` recreates a view; its first call recomputes the tensor.
    """

    def __init__(
        self, producer: Callable[[Tensor], Tensor], x: Tensor, replay: "_Replay | None"
    ) -> None:
        self.producer, self.x, self.replay = producer, x.detach(), replay or nullcontext()
        self.num_packed = self.num_unpacked = 0
        self.tensor: Tensor | None = None  # set from the first to the last unpack of a backward
        self.autocast = same_autocast(x.device)

    def identify(self, y: Tensor) -> None:
        """Record storage, shape and strides of y without a reference to y."""
        self.shape, self.stride, self.dtype = y.shape, y.stride(), y.dtype
        self.storage = y.untyped_storage().data_ptr()

    def pack(self, saved: Tensor) -> Any:
        """Return a saved tensor's geometry if it is a view of the recomputed tensor."""
        if saved.untyped_storage().data_ptr() != self.storage or saved.dtype != self.dtype:
            return saved
        self.num_packed += 1
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """Return the saved tensor, from the recomputed tensor if ``pack`` replaced it."""
        if isinstance(packed, Tensor):
            return packed
        return self.recomputed().as_strided(*packed)

    def recomputed(self) -> Tensor:
        """Return the tensor, which the first call recomputes and the last call releases."""
        tensor = self.tensor
        if tensor is None:
            with torch.no_grad(), self.autocast, self.replay:
                tensor = self.producer(self.x)
            assert tensor.shape == self.shape
            assert tensor.stride() == self.stride
        # Modulo: a second backward (retain_graph) counts from 0 again.
        self.num_unpacked = (self.num_unpacked + 1) % self.num_packed
        self.tensor = tensor if self.num_unpacked else None
        return tensor


class _Replay:
    """A context in which the streams have their states from its construction.

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
