"""Forwards that are recorded: CUDA graphs, which start hundreds of kernels at once.

What is recorded reads and writes the same memory each time, and nothing on the host decides
what it computes. Where that does not hold, ``unrecorded_reason`` says why.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from mcore_models.protocol import LanguageModel
from mcore_moe.layer import MoELayer

Result = TypeVar("Result")


class Recorder:
    """Records CUDA graphs, which share one pool of memory and run one after the other."""

    def __init__(self) -> None:
        """Record nothing yet."""
        self._pool = torch.cuda.graph_pool_handle()

    def recorded(self, forward: Callable[[], Result]) -> Callable[[], Result]:
        """Return what computes the same again; its results lie where the first ones did.

        Runs ``forward`` as it is first: kernels are compiled and tried, workspaces allocated.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = forward()
        return partial(_replay, graph, result, forward)


def unrecorded_reason(model: LanguageModel) -> str:
    """Say why forwards of a model are not recorded on this device; empty: they are."""
    if next(model.parameters()).device.type != "cuda":
        return "there is no GPU"
    if any(isinstance(module, MoELayer) for module in model.modules()):
        return "experts read the sizes of their inputs on the host"
    return "stages send to each other" if model.pp.size > 1 else ""


def _replay(
    graph: torch.cuda.CUDAGraph,
    result: Result,
    forward: Any,  # noqa: ARG001 - holds memory that the graph reads
) -> Result:
    graph.replay()
    return result
