"""Forward and backward of each layer as CUDA graphs, where a whole step cannot be recorded.

Between layers the host stays in charge: it waits for messages of the pipeline, runs any
schedule, and starts the sums of gradients. A layer has two graphs for each micro-batch that is
in flight at once, since what its forward keeps must last until its backward. They are recorded
when a micro-batch first needs them; micro-batches take the first that are free, so that each
step takes them in the same order. A layer reads its input where the one before has written it.

Kernels, their order and their random numbers are those of layers launched singly, so the bits
are too, but for the sign of zeros: gradients are always added to zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.residual import Residual
from mcore_models.protocol import MicroBatch
from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.grad_slot import slot_of
from mcore_parallel.precision.fp8 import WeightCasts
from mcore_parallel.rng import RngStreams
from mcore_train.graphs.whole_step import signature_of
from mcore_train.losses import StepLosses

Tensors = tuple[Tensor | None, ...]
Layer = Callable[[Residual, BlockInputs], Residual]


class Recorder(Protocol):
    """Makes of a function what does the same again on the same memory."""

    def record(self, function: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        """Return what it returns, to be written by each call of what is returned beside it."""

    def forget(self) -> None:
        """Let go of all recordings."""


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory."""

    def __init__(self, streams: RngStreams) -> None:
        """Record nothing yet; ``streams`` may be drawn from."""
        self._streams, self._pool = streams, torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(self, function: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        """Record a graph, whose kernels do not run yet."""
        graph = torch.cuda.CUDAGraph()
        for generator in self._streams.generators():
            graph.register_generator_state(generator)
        # Threads that read data or write checkpoints may go on calling CUDA meanwhile. Not by
        # torch.cuda.graph, which empties the allocator's cache before each of many graphs.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
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
        self._pool = torch.cuda.graph_pool_handle()  # none may follow the last of a pool


@dataclass(eq=False)
class _Recording:
    """A layer for one micro-batch in flight."""

    begin: Tensors
    """What it reads: the stream, as leaves."""
    outputs: Tensors = ()
    grad_outputs: Tensors = ()
    grads: Tensors = ()
    """Of what it reads, then of its parameters; None: added to main gradients, or none."""
    forward: Callable[[], None] | None = None
    backward: Callable[[], None] | None = None
    live: Tensors = ()
    """Outputs with autograd's graph, which backward keeps."""


@dataclass(eq=False)
class _Slot:
    """What one micro-batch in flight writes to."""

    number: int
    inputs: BlockInputs
    layers: dict[int, _Recording] = field(default_factory=dict)


class LayerGraphs:
    """The layers of one stack, launched as graphs after some steps of launching singly."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        recorder: Recorder,
        num_warmup_steps: int,
        casts: WeightCasts,
    ) -> None:
        """Wrap layers; no communication.

        Args:
            layers: of a stack, in forward order; their ``forward`` is replaced.
            recorder: of graphs.
            num_warmup_steps: steps that come before recording: they compile, choose
                algorithms and connect ranks.
            casts: of weights to fp8, which later micro-batches read where the first wrote.
        """
        self.layers, self._recorder, self._casts = layers, recorder, casts
        self._num_warmup_steps = self._num_left = num_warmup_steps
        self._parameters = [
            [p for p in layer.parameters() if p.requires_grad] for layer in layers
        ]
        self._signature: Any = None
        self._is_open = False
        self._slots: list[_Slot] = []
        self._free: list[_Slot] = []
        self._current: _Slot | None = None
        self._held: list[Any] = []
        for place, layer in enumerate(layers):
            layer.forward = partial(self._call, place, layer.forward)

    @property
    def num_recorded(self) -> int:
        """Micro-batches in flight for which all layers have graphs."""
        return sum(len(slot.layers) == len(self.layers) for slot in self._slots)

    def begin_step(self, signature: Any) -> None:
        """Count a step; weights must have been gathered.

        Args:
            signature: shapes of all its micro-batches; others than before let go of graphs.
        """
        if signature != self._signature:
            self.forget()
            self._signature, self._num_left = signature, self._num_warmup_steps + 1
        self._num_left = max(0, self._num_left - 1)
        self._free = list(self._slots)  # whatever a step left open
        self._is_open = True

    def end_step(self) -> None:
        """Launch layers singly until the next step begins."""
        self._is_open = False

    def forget(self) -> None:
        """Let go of graphs and their memory."""
        self._recorder.forget()
        self._slots, self._free, self._current, self._held = [], [], None, []

    def _call(
        self, place: int, forward: Layer, stream: Residual, inputs: BlockInputs
    ) -> Residual:
        if self._num_left or not self._is_open or not torch.is_grad_enabled():
            return forward(stream, inputs)
        if place == 0:
            self._current = self._take(inputs)
        slot = self._current
        assert slot is not None
        if place not in slot.layers:
            slot.layers[place] = self._record(place, forward, stream, slot)
        found = _Replay.apply(self, slot, place, *stream, *self._parameters[place])
        return Residual(*found)

    def _take(self, inputs: BlockInputs) -> _Slot:
        """Take the first free slot for a micro-batch, or make one."""
        tables = _tables(inputs)
        for parameter in chain.from_iterable(self._parameters):
            if (gradient := slot_of(parameter)) is not None and gradient.take_stale():
                gradient.zero()
        if self._free:
            slot = min(self._free, key=lambda slot: slot.number)
            self._free.remove(slot)
            _copy(tree_flatten(_tables(slot.inputs))[0], tree_flatten(tables)[0])
            return slot
        kept = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tables)
        rotary, local, temperature = kept
        kept = replace(inputs, rotary=rotary, local_rotary=local, temperature=temperature)
        self._slots.append(_Slot(len(self._slots), kept))
        return self._slots[-1]

    def _record(self, place: int, forward: Layer, stream: Residual, slot: _Slot) -> _Recording:
        before = slot.layers[place - 1].outputs if place else ()
        own = {x.data_ptr() for x in before if x is not None}
        begin = tuple(
            None
            if x is None
            else (x.detach() if x.data_ptr() in own else x.detach().clone()).requires_grad_(
                x.requires_grad
            )
            for x in stream
        )
        made = _Recording(begin)
        inputs = [x for x in (*begin, *self._parameters[place]) if x is not None]
        inputs = [x for x in inputs if x.requires_grad]

        def run_forward() -> Tensors:
            with torch.enable_grad():
                begin: Any = made.begin
                made.live = tuple(forward(Residual(*begin), slot.inputs))
            return tuple(x if x is None else x.detach() for x in made.live)

        def run_backward() -> Tensors:
            pairs = [
                (x, g)
                for x, g in zip(made.live, made.grad_outputs, strict=True)
                if x is not None and x.requires_grad
            ]
            outputs, grads = zip(*pairs, strict=True)
            return torch.autograd.grad(
                outputs, inputs, grads, retain_graph=True, allow_unused=True
            )

        made.outputs, made.forward = self._recorder.record(run_forward)
        made.grad_outputs = tuple(
            None if x is None else torch.zeros_like(x) for x in made.outputs
        )
        found, made.backward = self._recorder.record(run_backward)
        grads = iter(found)
        made.grads = tuple(
            next(grads) if x is not None and x.requires_grad else None
            for x in (*begin, *self._parameters[place])
        )
        self._held.append(self._casts.held())
        return made

    def run_forward(self, slot: _Slot, place: int, stream: Tensors) -> _Recording:
        """Launch a layer's forward."""
        made = slot.layers[place]
        _copy(made.begin, stream)
        assert made.forward is not None
        made.forward()
        return made

    def run_backward(self, slot: _Slot, place: int, grads: Tensors) -> Tensors:
        """Launch a layer's backward; return the gradients of stream and parameters."""
        made = slot.layers[place]
        for own, grad in zip(made.grad_outputs, grads, strict=True):
            if own is not None and grad is None:
                own.zero_()
        _copy(made.grad_outputs, grads)
        assert made.backward is not None
        made.backward()
        if place:
            return made.grads
        self._free.append(slot)
        return tuple(x if x is None else x.clone() for x in made.grads)  # may be sent


class LayerRecorder:
    """The gradients of a step with layers launched as graphs; used as ``BackwardRecorder``."""

    def __init__(
        self,
        stacks: Sequence[Sequence[nn.Module]],
        data_parallel: GradientSync,
        recorders: Callable[[], Recorder],
        num_warmup_steps: int,
        casts: WeightCasts,
    ) -> None:
        """Wrap the layers of all stacks of this rank; see ``LayerGraphs``.

        Args:
            stacks: of ``layer_stacks``.
            data_parallel: holds weights and gradients.
            recorders: makes what records one stack.
            num_warmup_steps: see there.
            casts: see there.
        """
        self._data_parallel = data_parallel
        self.stacks = [
            LayerGraphs(layers, recorders(), num_warmup_steps, casts)
            for layers in stacks
            if layers
        ]

    def __call__(
        self, compute: Callable[[Any], StepLosses], batches: Sequence[MicroBatch]
    ) -> StepLosses:
        """Compute the gradients of a step; communicates as ``compute`` does.

        Raises:
            RuntimeError: before anything is computed, if documents are packed in a batch, or
                micro-batches differ in shape.
        """
        first, *others = [signature_of(batch) for batch in batches]
        if any(other != first for other in others):
            raise RuntimeError(
                "micro-batches of one step differ in shape, and the graphs of its layers do "
                "not: pad them to one length, or leave --cuda-graph-impl out."
            )
        self._data_parallel.wait_params()  # gathers that began outside graphs
        for stack in self.stacks:
            stack.begin_step(first)
        try:
            return compute(batches)
        finally:
            for stack in self.stacks:
                stack.end_step()

    def __enter__(self) -> "LayerRecorder":
        return self

    def __exit__(self, *exception: object) -> None:
        for stack in self.stacks:
            stack.forget()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graphs: LayerGraphs, slot: _Slot, place: int, *tensors: Tensor | None
    ) -> Tensors:
        ctx.graphs, ctx.slot, ctx.place = graphs, slot, place
        ctx.set_materialize_grads(False)
        made = graphs.run_forward(slot, place, tensors[: len(Residual._fields)])
        is_last = place == len(graphs.layers) - 1  # what follows may keep it, or send it
        found = tuple(
            x if x is None else x.clone() if is_last else x.detach() for x in made.outputs
        )
        ctx.mark_non_differentiable(
            *(
                x
                for x, own in zip(found, made.live, strict=True)
                if x is not None and own is not None and not own.requires_grad
            )
        )
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, *ctx.graphs.run_backward(ctx.slot, ctx.place, grads)


def _tables(inputs: BlockInputs) -> tuple[Any, Any, Tensor | None]:
    return inputs.rotary, inputs.local_rotary, inputs.temperature


def _copy(to: Sequence[Tensor | None], new: Sequence[Tensor | None]) -> None:
    """Copy tensors to where graphs read them, where they are not there already."""
    with torch.no_grad():
        for own, x in zip(to, new, strict=True):
            if own is not None and x is not None and own.data_ptr() != x.data_ptr():
                own.copy_(x, non_blocking=True)
