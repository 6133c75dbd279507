"""Trading compute for memory: forget what a function saved, run it again in backward.

``recompute`` keeps a function's inputs instead of what lies inside it; its inputs may be kept
in pieces, one a tensor rank. ``recompute_between`` keeps nothing of a tensor that one part
makes cheaply and the next one saves: a norm's or an activation's output.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeGuard

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mcore_parallel.autocasting import same_autocast
from mcore_parallel.collectives import all_gather, own_slice
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.rng import RngStreams


def recompute(
    function: Callable[..., Any],
    *args: object,
    streams: RngStreams | None = None,
    shared_by: Axis = SINGLE,
) -> Any:
    """Call a function, keep its inputs only, and run it again when backward needs more.

    The second run sees the same random numbers as the first, those of the default generators
    and of every named stream, which go on afterwards as if it had not happened. Collectives
    inside run again too, on every rank alike.

    Args:
        function: of tensors; must not depend on anything that changes before backward.
        args: handed to it; gradients flow to those that require one.
        streams: named streams that the function may draw from.
        shared_by: ranks that all hold the same inputs: each keeps a piece of every tensor
            that requires a gradient and divides evenly, and gathers it in backward.

    Returns:
        What the function returns.

    Reference:
        Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost. arXiv:1604.06174;
        in pieces: Rajbhandari et al. 2019, ZeRO, arXiv:1910.02054 (partitioned activation
        checkpointing).
    """
    again = nullcontext() if streams is None else _Replay(streams)
    kept = [_Piece(arg, shared_by) if _can_cut(arg, shared_by) else arg for arg in args]
    pieces = [arg for arg in kept if isinstance(arg, _Piece)]
    if not pieces:
        return _again(function, args, again)

    def run(_of_the_device: Tensor, *args: object) -> Any:
        return function(*(a.whole() if isinstance(a, _Piece) else a for a in args))

    # Without any tensor torch would not know whose generators to keep.
    result = _again(run, (pieces[0].whole().new_empty(0), *kept), again)
    for piece in pieces:
        piece.cut()
    return result


def recompute_between(
    producer: Callable[[Tensor], Tensor],
    consumer: Callable[[Tensor], Any],
    x: Shaped[Tensor, "..."],
    *,
    streams: RngStreams | None = None,
) -> Any:
    """Return ``consumer(producer(x))`` and keep x in place of what the consumer saves of it.

    What lies between is freed once the consumer returns, if nobody else holds it, and made
    again, without gradient, when backward of the consumer first asks for it. It is freed again
    when all that saved it have had it.

    Args:
        producer: from one contiguous tensor to another; cheap, talks to nobody.
        consumer: may save its argument, or views of it.
        x: kept until backward, as the producer keeps it anyway.
        streams: named streams that the producer may draw from.
    """
    between = _Between(producer, x, None if streams is None else _Replay(streams))
    y = producer(x)
    if not y.requires_grad:
        return consumer(y)
    between.look_at(y)
    with saved_tensors_hooks(between.pack, between.unpack):
        return consumer(y)


def _again(function: Callable[..., Any], args: tuple[object, ...], replay: Any) -> Any:
    return checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), replay)
    )


class _Piece:
    """An input of a recomputed function, of which this rank keeps one piece."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self.axis, self.shape = axis, x.shape
        self.x: Tensor | None = x
        self.part: Tensor | None = None

    def whole(self) -> Tensor:
        """Return the input itself at first, then one gathered from all ranks."""
        if self.x is not None:
            return self.x
        assert self.part is not None
        return all_gather(self.part, self.axis).view(self.shape).requires_grad_()

    def cut(self) -> None:
        """Let go of the whole."""
        assert self.x is not None
        self.part = own_slice(self.x.detach().reshape(-1), self.axis).clone()
        self.x = None


def _can_cut(x: object, axis: Axis) -> TypeGuard[Tensor]:
    if not isinstance(x, Tensor) or axis.size == 1:
        return False
    return x.requires_grad and torch.is_grad_enabled() and x.numel() % axis.size == 0


class _Between:
    """A tensor that is made again, once, for all that saved it."""

    def __init__(
        self, producer: Callable[[Tensor], Tensor], x: Tensor, replay: "_Replay | None"
    ) -> None:
        self.producer, self.x, self.replay = producer, x.detach(), replay or nullcontext()
        self.num_savers = self.num_served = 0
        self.made: Tensor | None = None
        self.autocast = same_autocast(x.device)

    def look_at(self, y: Tensor) -> None:
        """Learn what the tensor is told by, without holding it."""
        self.shape, self.stride, self.dtype = y.shape, y.stride(), y.dtype
        self.storage = y.untyped_storage().data_ptr()

    def pack(self, saved: Tensor) -> Any:
        """Replace what autograd saves, if it is a view of the tensor."""
        if saved.untyped_storage().data_ptr() != self.storage or saved.dtype != self.dtype:
            return saved
        self.num_savers += 1
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """Return what autograd saved."""
        if isinstance(packed, Tensor):
            return packed
        return self.again().as_strided(*packed)

    def again(self) -> Tensor:
        """Return the tensor; the last of those that saved it lets it go."""
        made = self.made
        if made is None:
            with torch.no_grad(), self.autocast, self.replay:
                made = self.producer(self.x)
            assert made.shape == self.shape
            assert made.stride() == self.stride
        self.num_served = (self.num_served + 1) % self.num_savers
        self.made = made if self.num_served else None
        return made


class _Replay:
    """Inside, the streams start where they stood when this was made; outside, they go on.

    Entered once for each backward pass through the function (``retain_graph``).
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
