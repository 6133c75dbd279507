"""Trading compute for memory: forget what a function saved, run it again in backward."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mcore_parallel.rng import RngStreams


def recompute(
    function: Callable[..., Any], *args: object, streams: RngStreams | None = None
) -> Any:
    """Call a function, keep its inputs only, and run it again when backward needs more.

    The second run sees the same random numbers as the first, those of the default generators
    and of every named stream, which go on afterwards as if it had not happened. Collectives
    inside run again too, on every rank alike.

    Args:
        function: of tensors; must not depend on anything that changes before backward.
        args: handed to it; gradients flow to those that require one.
        streams: named streams that the function may draw from.

    Returns:
        What the function returns.

    Reference:
        Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost. arXiv:1604.06174.
    """
    again = nullcontext() if streams is None else _Replay(streams)
    return checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again)
    )


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
