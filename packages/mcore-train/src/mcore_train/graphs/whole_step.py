"""Forward and backward of a whole step as one CUDA graph: recorded once, launched at once.

The kernels of a small model are shorter than the time in which the host launches them, so the
GPU waits. A graph takes one launch for all. Kernels, their order and their random numbers are
those of the step without it, so the results are the same bits.

Options that a graph cannot hold are refused where flags are read (``options``): shapes that
depend on data, and operations for which the host waits.
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
"""The tensors of each micro-batch of a step."""


_POSITIONS = "position_ids"


class BackwardRecorder:
    """The gradients of a step, by a graph once the same shapes have come a few times.

    The memory of a step's activations stays with the graph. Only the latest shapes have one:
    others, such as a batch that has grown, are computed as ever at first and then recorded
    in its place.

    Leave it as a context, or ``forget``, before process groups end: nccl waits for graphs
    that hold its operations.
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
            data_parallel: holds the gradients that are computed.
            streams: random streams that may be drawn from.
            num_warmup_steps: steps of equal shapes that come before recording: they compile,
                choose algorithms and connect ranks.
            clock: opens no spans while the graph is recorded.
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
        """Whether the next step of these shapes is launched as a graph."""
        return self._graph is not None

    def __call__(self, compute: Compute, batches: Sequence[MicroBatch]) -> StepLosses:
        """Compute the gradients of a step; communicates as ``compute`` does.

        Args:
            compute: always the same; called at first, and once while recording.
            batches: this rank's micro-batches; copied to where the graph reads them.

        Raises:
            RuntimeError: if recording begins on CUDA's default stream, or documents are
                packed in a batch.
        """
        signature = tuple(map(signature_of, batches))
        if signature != self._signature:
            self.forget()
            self._signature = signature
        if self._num_seen < self._num_warmup_steps:
            self._num_seen += 1
            return compute(batches)
        # Gathers that began outside cannot be waited for inside.
        self._data_parallel.wait_params()
        if self._graph is None:
            self._record(compute, batches)
        for kept, batch in zip(self._inputs, batches, strict=True):
            new = _tensors_of(batch)
            for name, tensor in _tensors_of(kept).items():
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
        """Free the graph and its memory, and begin to count warm-up steps again."""
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
        # Threads that read data or write checkpoints call CUDA during the capture.
        # A graph cannot hold the events that the clock times spans by.
        with (
            self._clock.paused(),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            self._outputs = compute(self._inputs)
        self._graph = graph


def _tensors_of(batch: MicroBatch) -> dict[str, Tensor]:
    if batch.documents is not None:
        raise RuntimeError(
            "packed documents change from step to step, and a graph's kernels do not: leave "
            "--cuda-graph-impl out."
        )
    positions = {} if batch.positions is None else {_POSITIONS: batch.positions}
    return {**batch.entries, **positions}


def signature_of(batch: MicroBatch) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """Describe the tensors of a micro-batch; packed documents raise RuntimeError."""
    return tuple((name, each.shape, each.dtype) for name, each in _tensors_of(batch).items())


def _copy_of(batch: MicroBatch) -> MicroBatch:
    entries = {name: tensor.clone() for name, tensor in batch.entries.items()}
    positions = None if batch.positions is None else batch.positions.clone()
    return replace(batch, entries=entries, positions=positions)
