"""Records functions on the device as CUDA graphs, with memory pools."""

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_parallel.rng import RngStreams
from mcore_parallel.step_clock import StepClock

Tensors = tuple[Tensor | None, ...]


class Recorder(Protocol):
    """Records a function and returns its replay on the same memory."""

    def record(
        self, function: Callable[[], Tensors], memory: Hashable
    ) -> tuple[Tensors, Callable[[], None]]:
        """Return the function's results, and a function that computes them again in place.

        Args:
            function: function to record.
            memory: key of the memory pool of the recording. Recordings of a pool reuse memory
                that earlier ones freed, so a replay of an earlier one overwrites results of
                later ones.
        """

    def forget(self) -> None:
        """Free all recordings."""


class CudaRecorder:
    """Records CUDA graphs, each in one of several pools of memory."""

    def __init__(self, streams: RngStreams, clock: StepClock) -> None:
        """Store streams and clock.

        Args:
            streams: random streams that functions may use.
            clock: clock of the step, which is paused while a graph is recorded.
        """
        self._streams, self._clock = streams, clock
        self._pools: dict[Hashable, Any] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(
        self, function: Callable[[], Tensors], memory: Hashable
    ) -> tuple[Tensors, Callable[[], None]]:
        """Record a graph; its kernels run at the first replay."""
        if memory not in self._pools:
            self._pools[memory] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        for generator in self._streams.generators():
            graph.register_generator_state(generator)
        # thread_local: threads that read data or write checkpoints call CUDA during a capture.
        # torch.cuda.graph is not used, since it empties the allocator's cache for each graph.
        graph.capture_begin(pool=self._pools[memory], capture_error_mode="thread_local")
        try:
            with self._clock.paused():  # a graph cannot contain timing events
                outputs = function()
        finally:
            graph.capture_end()
        self._graphs.append(graph)
        return outputs, graph.replay

    def forget(self) -> None:
        """Reset all graphs; NCCL waits for graphs with its operations when it is destroyed."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pools.clear()  # a pool cannot be used again after its last graph was reset
