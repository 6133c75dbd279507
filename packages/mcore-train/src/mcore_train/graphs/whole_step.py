"""Records forward and backward of a whole step as one CUDA graph.

The kernels of a small model take less time than their launches by the host, so the GPU waits. A
graph needs one launch for all kernels. Kernels, their order and their random numbers are equal
to those without a graph, so results are equal to the last bit.

Options that a graph cannot contain are refused when flags are read (``options``): shapes that
depend on data, and operations that the host waits for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mcore_models.protocol import MicroBatch
from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.rng import RngStreams
from mcore_parallel.step_clock import Span, StepClock
from mcore_train.losses import StepLosses

Compute = Callable[[Sequence[MicroBatch]], StepLosses]
"""Computes the summed gradients of a step from this rank's micro-batches."""

Signature = tuple[tuple[tuple[str, torch.Size, torch.dtype], ...], ...]
"""Names, shapes and dtypes of the tensors of each micro-batch of a step."""


_POSITIONS = "position_ids"


class BackwardRecorder:
    """Computes the gradients of a step, by a graph after some steps of equal shapes.

    The graph owns the memory of a step's activations. Only the latest shapes have a graph: for
    other shapes, such as a larger batch, steps run without a graph at first, and then a new
    graph replaces the old one.

    Leave the context, or call ``forget``, before process groups are destroyed: NCCL waits for
    graphs with its operations.
    """

    def __init__(
        self,
        data_parallel: GradientSync,
        streams: RngStreams,
        num_warmup_steps: int,
        clock: StepClock,
        *,
        is_timed: bool,
    ) -> None:
        """Begin without a graph.

        Args:
            data_parallel: owner of the gradients.
            streams: random streams of the step.
            num_warmup_steps: steps of equal shapes before recording, which compile, choose
                algorithms and connect ranks.
            clock: clock of the step, which opens no spans in the graph of most steps.
            is_timed: whether to record a second graph with the clock's spans, for the steps
                that the clock records. It shares the memory of the first graph.
        """
        self._data_parallel, self._streams, self._clock = data_parallel, streams, clock
        self._is_timed = is_timed
        self._num_warmup_steps = num_warmup_steps
        self._signature: Signature | None = None
        self._num_seen = 0
        self._graph: _Graph | None = None
        self._timed_graph: _Graph | None = None
        self._inputs: list[MicroBatch] = []

    @property
    def is_recorded(self) -> bool:
        """Whether the next step of these shapes runs as a graph."""
        return self._graph is not None

    def __call__(self, compute: Compute, batches: Sequence[MicroBatch]) -> StepLosses:
        """Compute the gradients of a step; communicates as ``compute`` does.

        Args:
            compute: must be the same function at each call; called in warm-up steps, and once
                for recording.
            batches: this rank's micro-batches, which are copied to the graph's inputs.

        Raises:
            RuntimeError: if recording begins on CUDA's default stream, or a batch has packed
                documents.
        """
        signature = tuple(map(signature_of, batches))
        if signature != self._signature:
            self.forget()
            self._signature = signature
        if self._num_seen < self._num_warmup_steps:
            self._num_seen += 1
            return compute(batches)
        # A graph cannot wait for gathers that were started outside of it.
        self._data_parallel.wait_params()
        if self._graph is None:
            self._record(compute, batches)
        for graph_input, batch in zip(self._inputs, batches, strict=True):
            new = _tensors_of(batch)
            for name, tensor in _tensors_of(graph_input).items():
                tensor.copy_(new[name], non_blocking=True)
        graph = self._graph
        if self._clock.is_recording and self._timed_graph is not None:
            graph = self._timed_graph
            self._clock.add_replayed(graph.spans)
        assert graph is not None
        graph.recording.replay()
        return graph.losses.clone()

    def __enter__(self) -> "BackwardRecorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.forget()

    def forget(self) -> None:
        """Free the graphs and their memory, and count warm-up steps again."""
        for graph in filter(None, (self._graph, self._timed_graph)):
            graph.recording.reset()
        self._graph, self._timed_graph, self._inputs = None, None, []
        self._signature, self._num_seen = None, 0

    def _record(self, compute: Compute, batches: Sequence[MicroBatch]) -> None:
        stream = torch.cuda.current_stream()
        if stream == torch.cuda.default_stream():
            raise RuntimeError(
                "a graph cannot be recorded on CUDA's default stream: build and train the run "
                "inside torch.cuda.stream(torch.cuda.Stream()), as joined_world does."
            )
        self._inputs = [_copy_of(batch) for batch in batches]
        with self._clock.paused():
            self._graph = self._capture(compute, stream, None, [])
        if self._is_timed:
            pool = self._graph.recording.pool()
            with self._clock.capturing() as spans:
                self._timed_graph = self._capture(compute, stream, pool, spans)

    def _capture(
        self, compute: Compute, stream: torch.cuda.Stream, pool: Any, spans: list[Span]
    ) -> "_Graph":
        graph = torch.cuda.CUDAGraph()
        for generator in self._streams.generators():
            graph.register_generator_state(generator)
        # thread_local: threads that read data or write checkpoints call CUDA during a capture.
        with torch.cuda.graph(
            graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        ):
            losses = compute(self._inputs)
        return _Graph(graph, losses, spans)


@dataclass(frozen=True, slots=True)
class _Graph:
    recording: torch.cuda.CUDAGraph
    losses: StepLosses
    """Overwritten by each replay."""
    spans: list[Span]
    """Timed by each replay."""


def _tensors_of(batch: MicroBatch) -> dict[str, Tensor]:
    if batch.documents is not None:
        raise RuntimeError(
            "packed documents change the kernels of each step, and a CUDA graph is fixed. "
            "Leave out --cuda-graph-impl."
        )
    positions = {} if batch.positions is None else {_POSITIONS: batch.positions}
    return {**batch.entries, **positions}


def signature_of(batch: MicroBatch) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """Return the signature of a micro-batch; raise ``RuntimeError`` for packed documents."""
    return tuple((name, each.shape, each.dtype) for name, each in _tensors_of(batch).items())


def _copy_of(batch: MicroBatch) -> MicroBatch:
    entries = {name: tensor.clone() for name, tensor in batch.entries.items()}
    positions = None if batch.positions is None else batch.positions.clone()
    return replace(batch, entries=entries, positions=positions)
