"""Records functions on the device as CUDA graphs, in pools of memory."""

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_parallel.rng import RngStreams
from mcore_parallel.step_clock import StepClock

Tensors = tuple[Tensor | None, ...]


class Recorder(Protocol):
    """Turns a function into a replay of it on the same memory."""

    def record(
        self, function: Callable[[], Tensors], memory: Hashable
    ) -> tuple[Tensors, Callable[[], None]]:
        """Return the function's results, and a function that computes them again in place.

        Args:
            function: recorded.
            memory: key of the pool that the recording allocates from. Memory that one
                function frees is given to those recorded after it from the pool: a replay of
                the first overwrites what the later ones keep.
        """

    def forget(self) -> None:
        """Free all recordings."""


class CudaRecorder:
    """Records CUDA graphs, each in one of several pools of memory."""

    def __init__(self, streams: RngStreams, clock: StepClock) -> None:
        """Record nothing yet.

        Args:
            streams: random streams that functions may draw from.
            clock: opens no spans while a graph is recorded.
        """
        self._streams, self._clock = streams, clock
        self._pools: dict[Hashable, Any] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(
        self, function: Callable[[], Tensors], memory: Hashable
    ) -> tuple[Tensors, Callable[[], None]]:
        """Record a graph, whose kernels do not run yet."""
        if memory not in self._pools:
            self._pools[memory] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        for generator in self._streams.generators():
            graph.register_generator_state(generator)
        # Threads that read data or write checkpoints call CUDA during the capture. Not by
        # torch.cuda.graph, which empties the allocator's cache before each of many graphs.
        graph.capture_begin(pool=self._pools[memory], capture_error_mode="thread_local")
        try:
            with self._clock.paused():  # a graph cannot hold events that are timed
                outputs = function()
        finally:
            graph.capture_end()
        self._graphs.append(graph)
        return outputs, graph.replay

    def forget(self) -> None:
        """Reset all graphs: nccl waits for those that hold its operations."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pools.clear()  # none may follow the last of a pool
