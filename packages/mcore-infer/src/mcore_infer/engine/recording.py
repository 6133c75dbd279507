"""Forwards that are recorded: CUDA graphs, which start hundreds of kernels at once.

What is recorded reads and writes the same memory each time, and nothing on the host decides
what it computes. Where that cannot hold, ``unrecorded_reason`` says why; where it does not (a
GEMM of experts that needs their sizes on the host), the recorder finds out.
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
    """Records CUDA graphs, which share one pool of memory and run one after the other.

    Attributes:
        gave_up: whether a forward has waited for the device, and so nothing is recorded.
    """

    def __init__(self) -> None:
        """Record nothing yet."""
        self._pool = torch.cuda.graph_pool_handle()
        self.gave_up = False

    def recorded(self, forward: Callable[[], Result]) -> Callable[[], Result]:
        """Return what computes the same again; its results lie where the first ones did.

        Runs ``forward`` as it is first: kernels are compiled and tried, workspaces allocated.
        Returns it where it waits for the device.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()
            try:
                with _no_waits():
                    forward()
            except RuntimeError as error:
                if "synchronizing CUDA operation" not in str(error):
                    raise
                log.warning("steps are not recorded: a forward waits for the device.")
                self.gave_up = True
        torch.cuda.current_stream().wait_stream(stream)
        if self.gave_up:
            return forward
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = forward()
        return partial(_replay, graph, result, forward)


def unrecorded_reason(model: LanguageModel) -> str:
    """Say why forwards of a model are not recorded on this device; empty: they are."""
    if next(model.parameters()).device.type != "cuda":
        return "there is no GPU"
    if depends_on_length(model.config):
        return "rotary positions depend on the length of the text"
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not all(isinstance(layer.dispatcher, LocalDispatcher) for layer in layers):
        return "ranks of experts exchange the sizes of what they send on the host"
    return "stages send to each other" if model.pp.size > 1 else ""


@contextmanager
def _no_waits() -> Iterator[None]:
    """Let whatever waits for the device raise."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # That it is a prototype: a wait that it misses fails the recording itself.
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _replay(
    graph: torch.cuda.CUDAGraph,
    result: Result,
    forward: Any,  # noqa: ARG001 - holds memory that the graph reads
) -> Result:
    graph.replay()
    return result
