"""Records forwards as CUDA graphs, so that one launch starts hundreds of kernels.

A recorded forward reads and writes the same memory in every replay, and no launch may depend on
values that the host reads. ``unrecorded_reason`` lists the models for which that is impossible.
Any other forward that waits for the device (an expert GEMM that needs sizes on the host) is
detected during recording, and runs without a graph.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from mcore_infer.engine.checks import depends_on_length
from mcore_models.protocol import LanguageModel
from mcore_moe.dispatch.local import LocalDispatcher
from mcore_moe.layer import MoELayer

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Recorder:
    """Records CUDA graphs that share one memory pool, because they never run concurrently.

    Attributes:
        gave_up: whether a forward waited for the device; from then on nothing is recorded.
    """

    def __init__(self) -> None:
        """Create the memory pool and the warm-up stream; records nothing."""
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all warm-ups: cuBLAS keeps a workspace of 32 MiB for each stream.
        self._stream = torch.cuda.Stream()
        self.gave_up = False

    def recorded(self, forward: Callable[[], Result]) -> Callable[[], Result]:
        """Record a forward; return a function that replays it into the same result tensors.

        Returns ``forward`` itself if it waits for the device.
        """
        # Warm up on a side stream, as graph capture requires: kernels are compiled and tried,
        # libraries allocate their workspaces. The second run raises if anything synchronizes.
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()
            try:
                with _no_waits():
                    forward()
            except RuntimeError as error:
                if "synchronizing CUDA operation" not in str(error):
                    raise
                log.warning("steps run without CUDA graphs: a forward waits for the device.")
                self.gave_up = True
        torch.cuda.current_stream().wait_stream(stream)
        if self.gave_up:
            return forward
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = forward()
        return partial(_replay, graph, result, forward)


def unrecorded_reason(model: LanguageModel) -> str:
    """Return why forwards of a model are not recorded on this device; empty if they are."""
    if next(model.parameters()).device.type != "cuda":
        return "there is no GPU"
    if depends_on_length(model.config):
        return "rotary positions depend on the length of the text"
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not all(isinstance(layer.dispatcher, LocalDispatcher) for layer in layers):
        return "expert-parallel ranks exchange the sizes of their messages on the host"
    return "stages send to each other" if model.pp.size > 1 else ""


@contextmanager
def _no_waits() -> Iterator[None]:
    """Within the context, operations that wait for the device raise RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns that this mode is a prototype: a wait that the mode misses makes the
        # graph capture fail instead.
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _replay(
    graph: torch.cuda.CUDAGraph,
    result: Result,
    forward: Any,  # noqa: ARG001 - holds references to the inputs that the graph reads
) -> Result:
    graph.replay()
    return result
