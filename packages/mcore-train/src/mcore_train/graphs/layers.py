"""Records forward and backward of each layer as CUDA graphs, if a step cannot be one graph.

The host runs between layers: it waits for pipeline messages, runs any schedule, and starts the
reduction of gradients. A layer of experts whose sizes depend on routing is recorded up to its
routing (``TransformerBlock.to_experts``); dispatch and experts run without a graph. A layer has
a forward and a backward graph for each micro-batch in flight, since the activations of a
forward must exist until its backward. Graphs are recorded when a micro-batch first needs them.
Each micro-batch uses the first free graphs, so all steps use them in the same order. A layer
reads its input from the memory that the previous layer wrote, and all backwards write gradients
of the stream to the same memory.

Kernels, their order and their random numbers are equal to those without graphs. Results are
equal to the last bit, except for the sign of zeros: gradients are always added to zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from mcore_models.building.stage_model import StageModel, block_groups
from mcore_models.config import RecomputeConfig
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.residual import Residual
from mcore_models.protocol import MicroBatch
from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.autograd.grad_slot import slot_of
from mcore_parallel.autograd.recomputing import recompute
from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.precision.fp8 import WeightCasts
from mcore_parallel.rng import RngStreams
from mcore_parallel.sharding import layer_stacks
from mcore_train.graphs.recorders import Recorder, Tensors
from mcore_train.graphs.whole_step import signature_of
from mcore_train.losses import StepLosses

_NUM_STREAM = len(Residual._fields)


@dataclass(frozen=True)
class LayerParts:
    """A layer as two functions: ``tail(*head(stream, inputs))`` equals ``forward``."""

    forward: Callable[[Residual, BlockInputs], Residual]
    """The complete layer, without a graph."""
    head: Callable[[Residual, BlockInputs], tuple[Residual, Any]]
    """The recorded part, in which no size depends on routing."""
    tail: Callable[[Residual, Any], Residual]
    """The rest of the layer, a function of the head's two results."""
    parameters: list[nn.Parameter]
    """Parameters of the head."""


@dataclass(eq=False)
class _Recording:
    """Graphs of a layer's head for one micro-batch in flight."""

    begin: Tensors
    """Inputs of the forward: the stream, as autograd leaves."""
    outputs: Tensors = ()
    """Results of the forward: the stream, then the other inputs of the tail."""
    live: Tensors = ()
    """``outputs`` with their autograd graph, for the backward."""
    spec: TreeSpec | None = None
    """Tree whose leaves are ``outputs`` and ``constants``."""
    constants: tuple[Any, ...] = ()
    grad_outputs: Tensors = ()
    grads: Tensors = ()
    """Gradients of ``begin``, then of the parameters; None for a gradient that was already
    added to the main gradient, or does not exist."""
    forward: Callable[[], None] | None = None
    backward: Callable[[], None] | None = None


@dataclass(eq=False)
class _Slot:
    """Graphs and memory of one micro-batch in flight, for all layers."""

    number: int
    inputs: BlockInputs
    layers: dict[int, _Recording] = field(default_factory=dict)


class LayerGraphs:
    """Runs the layers of one stack as graphs, after some steps without graphs."""

    def __init__(self, layers: Sequence[LayerParts], casts: WeightCasts) -> None:
        """Store the layers; no communication.

        Args:
            layers: parts of each layer of the stack, in forward order.
            casts: fp8 casts of weights, which the first micro-batch writes and later ones read.
        """
        self.layers, self._casts = layers, casts
        self._recorder: Recorder | None = None
        self._slots: list[_Slot] = []
        self._free: list[_Slot] = []
        self._current: _Slot | None = None
        self._grads: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        self._held: list[Any] = []

    @property
    def num_recorded(self) -> int:
        """Micro-batches in flight for which all layers have graphs."""
        return sum(len(slot.layers) == len(self.layers) for slot in self._slots)

    def begin_step(self, recorder: Recorder) -> None:
        """Run layers as graphs until ``end_step``; weights must have been gathered."""
        self._free = list(self._slots)  # also slots that a failed step did not release
        self._recorder = recorder

    def end_step(self) -> None:
        """Run layers without graphs until the next ``begin_step``."""
        self._recorder = None

    def forget(self) -> None:
        """Free the memory of all graphs, after ``Recorder.forget``."""
        self._slots, self._free, self._current = [], [], None
        self._held, self._grads = [], {}

    def call(self, place: int, stream: Residual, inputs: BlockInputs) -> Residual:
        """Run layer ``place``, as a graph between ``begin_step`` and ``end_step``."""
        layer = self.layers[place]
        if self._recorder is None or not torch.is_grad_enabled():
            return layer.forward(stream, inputs)
        if place == 0:
            self._current = self._take(inputs)
        slot = self._current
        assert slot is not None
        if place not in slot.layers:
            slot.layers[place] = self._record(place, stream, slot, self._recorder)
        recording = slot.layers[place]
        tensors = _Replay.apply(self, slot, place, *stream, *layer.parameters)
        # Rebuild the head's two results from the replay's tensors and the recorded constants.
        pairs = zip(tensors, recording.constants, strict=True)
        assert recording.spec is not None
        head_stream, tail_inputs = tree_unflatten(
            [constant if x is None else x for x, constant in pairs], recording.spec
        )
        return layer.tail(head_stream, tail_inputs)

    def _take(self, inputs: BlockInputs) -> _Slot:
        """Take the first free slot for a micro-batch, or create a slot."""
        tables = _tables(inputs)
        # Graphs add to main gradients, so those of the last step are zeroed before the first
        # use.
        for parameter in chain.from_iterable(layer.parameters for layer in self.layers):
            if (gradient := slot_of(parameter)) is not None and gradient.take_stale():
                gradient.zero()
        if self._free:
            slot = min(self._free, key=lambda slot: slot.number)
            self._free.remove(slot)
            # The slot's graphs read rotary tables from the addresses at their recording.
            _copy(tree_flatten(_tables(slot.inputs))[0], tree_flatten(tables)[0])
            return slot
        copies = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tables)
        rotary, local, temperature = copies
        copied = replace(inputs, rotary=rotary, local_rotary=local, temperature=temperature)
        self._slots.append(_Slot(len(self._slots), copied))
        return self._slots[-1]

    def _record(
        self, place: int, stream: Residual, slot: _Slot, recorder: Recorder
    ) -> _Recording:
        # Leaves alias the outputs of the previous layer, so no copy is needed before a replay.
        # Other tensors (the first layer's input) are copied to memory of the recording.
        previous = slot.layers[place - 1].outputs if place else ()
        addresses = {x.data_ptr() for x in previous if x is not None}
        begin: Any = tuple(
            None
            if x is None
            else (
                x.detach() if x.data_ptr() in addresses else x.detach().clone()
            ).requires_grad_(x.requires_grad)
            for x in stream
        )
        recording, layer = _Recording(begin), self.layers[place]

        def run_forward() -> Tensors:
            with torch.enable_grad():
                leaves, recording.spec = tree_flatten(layer.head(Residual(*begin), slot.inputs))
            recording.live = tuple(x if isinstance(x, Tensor) else None for x in leaves)
            recording.constants = tuple(None if isinstance(x, Tensor) else x for x in leaves)
            return tuple(x if x is None else x.detach() for x in recording.live)

        # Each slot has its own memory pool, so that a replay does not overwrite activations
        # that another micro-batch needs for its backward.
        memory = id(self), slot.number
        recording.outputs, recording.forward = recorder.record(run_forward, memory)
        self._held.append(self._casts.held())
        self._record_backward(recording, layer.parameters, recorder)
        return recording

    def _record_backward(
        self, recording: _Recording, parameters: list[nn.Parameter], recorder: Recorder
    ) -> None:
        recording.grad_outputs = self._gradients(recording.live)
        stream_grads = self._gradients(recording.begin)
        leaves = [*recording.begin, *parameters]
        inputs = [x for x in leaves if x is not None and x.requires_grad]

        def run_backward() -> Tensors:
            pairs = [
                (x, g)
                for x, g in zip(recording.live, recording.grad_outputs, strict=True)
                if x is not None and g is not None
            ]
            outputs, grad_outputs = zip(*pairs, strict=True)
            input_grads = iter(
                torch.autograd.grad(
                    outputs, inputs, grad_outputs, retain_graph=True, allow_unused=True
                )
            )
            grads = [
                next(input_grads) if x is not None and x.requires_grad else None for x in leaves
            ]
            written = _write(stream_grads, grads[:_NUM_STREAM])
            return *written, *grads[_NUM_STREAM:]

        # All backwards share one memory pool: they run in sequence, and their results are used
        # at once. Weight casts must not be allocated from this pool, since later replays would
        # overwrite them.
        with self._casts.forgetting():
            recording.grads, recording.backward = recorder.record(run_backward, "backward")

    def _gradients(self, tensors: Tensors) -> Tensors:
        """Return gradient buffers for tensors, which all backwards of the stack share."""
        buffers: list[Tensor | None] = []
        for number, x in enumerate(tensors):
            if x is None or not x.requires_grad:
                buffers.append(None)
                continue
            key = number, x.shape, x.dtype
            if key not in self._grads:
                self._grads[key] = torch.zeros_like(x, memory_format=torch.contiguous_format)
            buffers.append(self._grads[key])
        return tuple(buffers)

    def run_forward(self, slot: _Slot, place: int, stream: Tensors) -> _Recording:
        """Replay the forward of a layer's head."""
        recording = slot.layers[place]
        _copy(recording.begin, stream)
        assert recording.forward is not None
        recording.forward()
        return recording

    def run_backward(self, slot: _Slot, place: int, grads: Tensors) -> Tensors:
        """Replay the backward of a head; return the gradients of stream and parameters."""
        recording = slot.layers[place]
        # The recorded backward also reads outputs without a gradient: their gradient is zero.
        for buffer, grad in zip(recording.grad_outputs, grads, strict=True):
            if buffer is not None and grad is None:
                buffer.zero_()
        _copy(recording.grad_outputs, grads)
        assert recording.backward is not None
        recording.backward()
        if place:
            return recording.grads
        self._free.append(slot)
        # Copied, since the pipeline may still send these gradients when the next backward
        # overwrites the memory.
        return tuple(x if x is None else x.clone() for x in recording.grads)


class LayerRecorder:
    """Computes a step's gradients with layers as graphs. Called as ``BackwardRecorder``."""

    def __init__(
        self,
        chunks: Sequence[StageModel],
        data_parallel: GradientSync,
        recorder: Recorder,
        num_warmup_steps: int,
        casts: WeightCasts,
        *,
        records_experts: bool,
    ) -> None:
        """Replace ``call_block`` of this rank's chunks, and handle their recomputation.

        Args:
            chunks: pipeline chunks of the model.
            data_parallel: owner of weights and gradients.
            recorder: recorder of graphs.
            num_warmup_steps: steps before recording, which compile, choose algorithms and
                connect ranks.
            casts: as in ``LayerGraphs``.
            records_experts: whether graphs include experts, since no size depends on routing.
        """
        self._data_parallel, self._recorder = data_parallel, recorder
        self._num_warmup_steps = self._num_left = num_warmup_steps
        self._signature: Any = None
        self.stacks: list[LayerGraphs] = []
        self._places: dict[nn.Module, tuple[LayerGraphs, int]] = {}
        for chunk in chunks:
            for modules in filter(None, layer_stacks(chunk)):
                layers = [
                    layer_parts(module, chunk.streams, is_recomputed, records_experts)
                    for group, is_recomputed in block_groups(modules, chunk.recomputing)
                    for module in group
                ]
                stack = LayerGraphs(layers, casts)
                self.stacks.append(stack)
                self._places |= {module: (stack, i) for i, module in enumerate(modules)}
            chunk.recomputing, chunk.call_block = RecomputeConfig(), self._call_block

    def _call_block(self, block: nn.Module, stream: Residual, inputs: Any) -> Residual:
        """Run a block of the model, as ``StageModel.call_block``."""
        if block not in self._places:  # layers of multi-token prediction are not recorded
            return block(stream, inputs)
        stack, place = self._places[block]
        return stack.call(place, stream, inputs)

    def __call__(
        self, compute: Callable[[Any], StepLosses], batches: Sequence[MicroBatch]
    ) -> StepLosses:
        """Compute the gradients of a step; communicates as ``compute`` does.

        Raises:
            RuntimeError: before any computation, if a batch has packed documents, or
                micro-batches differ in shape.
        """
        first, *others = [signature_of(batch) for batch in batches]
        if any(other != first for other in others):
            raise RuntimeError(
                "micro-batches of a step differ in shape, and CUDA graphs have fixed shapes: "
                "pad them to one length, or leave --cuda-graph-impl out."
            )
        if first != self._signature:
            self.forget()
            self._signature, self._num_left = first, self._num_warmup_steps
        elif self._num_left:
            self._num_left -= 1
        if self._num_left:
            return compute(batches)
        self._data_parallel.wait_params()  # gathers that were started outside of graphs
        for stack in self.stacks:
            stack.begin_step(self._recorder)
        try:
            return compute(batches)
        finally:
            for stack in self.stacks:
                stack.end_step()

    def __enter__(self) -> "LayerRecorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.forget()

    def forget(self) -> None:
        """Free all graphs and their memory."""
        self._recorder.forget()
        for stack in self.stacks:
            stack.forget()


class _Replay(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any, graphs: LayerGraphs, slot: _Slot, place: int, *tensors: Tensor | None
    ) -> Any:
        ctx.graphs, ctx.slot, ctx.place = graphs, slot, place
        ctx.set_materialize_grads(False)
        recording = graphs.run_forward(slot, place, tensors[:_NUM_STREAM])
        # The last layer's stream is copied, since the model's head or a message uses it longer.
        is_last = place == len(graphs.layers) - 1
        outputs = tuple(
            x if x is None else x.clone() if is_last and n < _NUM_STREAM else x.detach()
            for n, x in enumerate(recording.outputs)
        )
        ctx.mark_non_differentiable(
            *(
                x
                for x, live in zip(outputs, recording.live, strict=True)
                if x is not None and live is not None and not live.requires_grad
            )
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, *ctx.graphs.run_backward(ctx.slot, ctx.place, grads)


def _write(buffers: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> Tensors:
    """Copy gradients to ``buffers``; return the buffers, with None for a missing gradient."""
    addresses = {x.data_ptr() for x in buffers if x is not None}
    # Copy a gradient that is stored in another gradient's buffer before any buffer is written.
    safe = []
    for buffer, g in zip(buffers, grads, strict=True):
        is_safe = (
            buffer is None or g is None or g.data_ptr() not in addresses - {buffer.data_ptr()}
        )
        safe.append(g if is_safe else g.clone())
    _copy(buffers, safe)
    return tuple(None if g is None else buffer for buffer, g in zip(buffers, safe, strict=True))


def _tables(inputs: BlockInputs) -> tuple[Any, Any, Tensor | None]:
    return inputs.rotary, inputs.local_rotary, inputs.temperature


def _copy(buffers: Sequence[Tensor | None], new: Sequence[Tensor | None]) -> None:
    """Copy tensors to the memory that graphs read; skip tensors that are stored there."""
    with torch.no_grad():
        for buffer, x in zip(buffers, new, strict=True):
            if buffer is not None and x is not None and buffer.data_ptr() != x.data_ptr():
                buffer.copy_(x, non_blocking=True)


def layer_parts(
    layer: Any, streams: RngStreams, is_recomputed: bool, records_experts: bool
) -> LayerParts:
    """Split a layer into head and tail.

    Args:
        layer: a ``TransformerBlock``.
        streams: random streams of its dropout.
        is_recomputed: whether backward recomputes the complete layer.
        records_experts: whether the graph includes experts; else they are the tail.
    """
    forward: Callable[[Residual, BlockInputs], Residual] = layer  # __call__ runs hooks

    def complete(stream: Residual, inputs: BlockInputs) -> tuple[Residual, None]:
        return layer.forward(stream, inputs), None  # a graph does not record hooks

    head, tail, tail_parameters = complete, _identity, set()
    if not records_experts and layer.stops_at_experts:
        head, tail = layer.to_experts, layer.from_experts
        tail_parameters = set(layer.moe.experts.parameters())
        if is_recomputed or "moe" in layer.recomputed:
            tail = partial(recompute, tail, streams=streams)
    if is_recomputed:
        forward, head = _with_recompute(forward, streams), _with_recompute(head, streams)
    parameters = [p for p in layer.parameters() if p.requires_grad and p not in tail_parameters]
    return LayerParts(forward, head, tail, parameters)


def _identity(stream: Residual, _: None) -> Residual:
    return stream


def _with_recompute(function: Callable[..., Any], streams: RngStreams) -> Callable[..., Any]:
    """Return a function that stores only the layer's input; backward recomputes the rest."""

    def run(stream: Residual, inputs: BlockInputs) -> Any:
        def of_tensors(x: Tensor, aux: Tensor) -> Any:
            return function(Residual(x, None, aux), inputs)

        # The stream and its deferred add are summed first, so that one tensor is stored, not
        # two.
        return recompute(of_tensors, stream.total(), stream.aux, streams=streams)

    return run
