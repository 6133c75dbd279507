"""Records forward and backward of a whole step as one CUDA graph.

The kernels of a small model take less time than their launches by the host, so the GPU waits. A
graph needs one launch for all kernels. Kernels, their order and their random numbers are equal
to those without a graph, so results are equal to the last bit.

Options that a graph cannot contain are refused when flags are read (``options``): shapes that
depend on data, and operations that the host waits for.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mcore_models.protocol import MicroBatch
from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.rng import RngStreams
from mcore_parallel.step_clock import StepClock
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
    ) -> None:
        """Begin without a graph.

        Args:
            data_parallel: owner of the gradients.
            streams: random streams of the step.
            num_warmup_steps: steps of equal shapes before recording, which compile, choose
                algorithms and connect ranks.
            clock: clock of the step, which is paused while the graph is recorded.
        """
        self._data_parallel, self._streams, self._clock = data_parallel, streams, clock
        self._num_warmup_steps = num_warmup_steps
        self._signature: Signature | None = None
        self._num_seen = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[MicroBatch] = []
        self._outputs: StepLosses | None = None

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
        assert self._graph is not None
        assert self._outputs is not None
        self._graph.replay()
        return self._outputs.clone()

    def __enter__(self) -> "BackwardRecorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.forget()

    def forget(self) -> None:
        """Free the graph and its memory, and count warm-up steps again."""
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._inputs, self._outputs = None, [], None
        self._signature, self._num_seen = None, 0

    def _record(self, compute: Compute, batches: Sequence[MicroBatch]) -> None:
        stream = torch.cuda.current_stream()
        if stream == torch.cuda.default_stream():
            raise RuntimeError(
                "a graph cannot be recorded on CUDA's default stream: build and train the run "
                "inside torch.cuda.stream(torch.cuda.Stream()), as joined_world does."
            )
        self._inputs = [_copy_of(batch) for batch in batches]
        graph = torch.cuda.CUDAGraph()
        for generator in self._streams.generators():
            graph.register_generator_state(generator)
        # thread_local: threads that read data or write checkpoints call CUDA during a capture.
        # The clock is paused, since a graph cannot contain its timing events.
        with (
            self._clock.paused(),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            self._outputs = compute(self._inputs)
        self._graph = graph


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
