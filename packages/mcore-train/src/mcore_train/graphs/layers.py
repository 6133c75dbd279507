"""Forward and backward of each layer as CUDA graphs, where a whole step cannot be recorded.

Between layers the host stays in charge: it waits for messages of the pipeline, runs any
schedule, and starts the sums of gradients. A layer of experts whose sizes follow from routing
is recorded up to its routing (``TransformerBlock.to_experts``); dispatch and experts are
launched singly. A layer has a forward and a backward graph for each micro-batch in flight,
since the activations of a forward must last until its backward. Graphs are recorded when a
micro-batch first needs them; each micro-batch takes the first free ones, so that all steps
take them in the same order. A layer reads its input from the memory that the layer before
wrote, and all backwards write gradients of the stream to the same memory.

Kernels, their order and their random numbers are those of layers launched singly. Results are
the same bits, apart from the sign of zeros: gradients are always added to zeros.
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
    """The whole layer, launched singly."""
    head: Callable[[Residual, BlockInputs], tuple[Residual, Any]]
    """The recorded part, in which no size depends on routing."""
    tail: Callable[[Residual, Any], Residual]
    """The rest, a function of both results of the head."""
    parameters: list[nn.Parameter]
    """Parameters of the head."""


@dataclass(eq=False)
class _Recording:
    """The graphs of a layer's head for one micro-batch in flight."""

    begin: Tensors
    """Inputs of the forward: the stream, as leaves of autograd."""
    outputs: Tensors = ()
    """Results of the forward: the stream, then the other inputs of the tail."""
    live: Tensors = ()
    """``outputs`` with their autograd graph, which the backward needs."""
    spec: TreeSpec | None = None
    """Tree whose leaves are ``outputs`` and ``constants``."""
    constants: tuple[Any, ...] = ()
    grad_outputs: Tensors = ()
    grads: Tensors = ()
    """Gradients of ``begin``, then of the parameters; None: added to main gradients already,
    or no gradient."""
    forward: Callable[[], None] | None = None
    backward: Callable[[], None] | None = None


@dataclass(eq=False)
class _Slot:
    """Memory of one micro-batch in flight: its graphs in all layers."""

    number: int
    inputs: BlockInputs
    layers: dict[int, _Recording] = field(default_factory=dict)


class LayerGraphs:
    """The layers of one stack, launched as graphs after some steps of launching singly."""

    def __init__(self, layers: Sequence[LayerParts], casts: WeightCasts) -> None:
        """Record nothing yet; no communication.

        Args:
            layers: how each layer of the stack is launched, in forward order.
            casts: of weights to fp8, which later micro-batches read where the first wrote.
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
        """Launch layers as graphs until ``end_step``; weights must have been gathered."""
        self._free = list(self._slots)  # also those that a failed step did not give back
        self._recorder = recorder

    def end_step(self) -> None:
        """Launch layers singly until the next step begins."""
        self._recorder = None

    def forget(self) -> None:
        """Free the memory of graphs that the recorder has freed."""
        self._slots, self._free, self._current = [], [], None
        self._held, self._grads = [], {}

    def call(self, place: int, stream: Residual, inputs: BlockInputs) -> Residual:
        """Run a layer: as a graph between ``begin_step`` and ``end_step``, else singly."""
        layer = self.layers[place]
        if self._recorder is None or not torch.is_grad_enabled():
            return layer.forward(stream, inputs)
        if place == 0:
            self._current = self._take(inputs)
        slot = self._current
        assert slot is not None
        if place not in slot.layers:
            slot.layers[place] = self._record(place, stream, slot, self._recorder)
        made = slot.layers[place]
        found = _Replay.apply(self, slot, place, *stream, *layer.parameters)
        # Put tensors from the replay and recorded constants back into the head's two results.
        both = zip(found, made.constants, strict=True)
        assert made.spec is not None
        left, given = tree_unflatten([c if x is None else x for x, c in both], made.spec)
        return layer.tail(left, given)

    def _take(self, inputs: BlockInputs) -> _Slot:
        """Take the first free slot for a micro-batch, or make one."""
        tables = _tables(inputs)
        # Graphs add to main gradients: those of the last step are zeroed before the first use.
        for parameter in chain.from_iterable(layer.parameters for layer in self.layers):
            if (gradient := slot_of(parameter)) is not None and gradient.take_stale():
                gradient.zero()
        if self._free:
            slot = min(self._free, key=lambda slot: slot.number)
            self._free.remove(slot)
            # The slot's graphs read rotary tables where they were when recorded.
            _copy(tree_flatten(_tables(slot.inputs))[0], tree_flatten(tables)[0])
            return slot
        kept = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tables)
        rotary, local, temperature = kept
        kept = replace(inputs, rotary=rotary, local_rotary=local, temperature=temperature)
        self._slots.append(_Slot(len(self._slots), kept))
        return self._slots[-1]

    def _record(
        self, place: int, stream: Residual, slot: _Slot, recorder: Recorder
    ) -> _Recording:
        # Leaves alias what the layer before wrote: then no copy is needed before a replay.
        # Tensors from elsewhere (the first layer's input) get memory of their own.
        before = slot.layers[place - 1].outputs if place else ()
        own = {x.data_ptr() for x in before if x is not None}
        begin: Any = tuple(
            None
            if x is None
            else (x.detach() if x.data_ptr() in own else x.detach().clone()).requires_grad_(
                x.requires_grad
            )
            for x in stream
        )
        made, layer = _Recording(begin), self.layers[place]

        def run_forward() -> Tensors:
            with torch.enable_grad():
                leaves, made.spec = tree_flatten(layer.head(Residual(*begin), slot.inputs))
            made.live = tuple(x if isinstance(x, Tensor) else None for x in leaves)
            made.constants = tuple(None if isinstance(x, Tensor) else x for x in leaves)
            return tuple(x if x is None else x.detach() for x in made.live)

        # Each slot has a pool of its own: a replay must not overwrite the activations that
        # another micro-batch keeps for its backward.
        memory = id(self), slot.number
        made.outputs, made.forward = recorder.record(run_forward, memory)
        self._held.append(self._casts.held())
        self._record_backward(made, layer.parameters, recorder)
        return made

    def _record_backward(
        self, made: _Recording, parameters: list[nn.Parameter], recorder: Recorder
    ) -> None:
        made.grad_outputs = self._gradients(made.live)
        into = self._gradients(made.begin)
        leaves = [*made.begin, *parameters]
        inputs = [x for x in leaves if x is not None and x.requires_grad]

        def run_backward() -> Tensors:
            pairs = [
                (x, g)
                for x, g in zip(made.live, made.grad_outputs, strict=True)
                if x is not None and g is not None
            ]
            outputs, grads = zip(*pairs, strict=True)
            found = iter(
                torch.autograd.grad(
                    outputs, inputs, grads, retain_graph=True, allow_unused=True
                )
            )
            grads = [next(found) if x is not None and x.requires_grad else None for x in leaves]
            own = _written(into, grads[:_NUM_STREAM])
            return *own, *grads[_NUM_STREAM:]

        # All backwards share one pool: they run one after the other, and their results are
        # used at once. Casts of weights must not come from it, since later replays would
        # overwrite them.
        with self._casts.forgetting():
            made.grads, made.backward = recorder.record(run_backward, "backward")

    def _gradients(self, tensors: Tensors) -> Tensors:
        """Return memory for gradients of tensors, which all backwards of the stack share."""
        found: list[Tensor | None] = []
        for number, x in enumerate(tensors):
            if x is None or not x.requires_grad:
                found.append(None)
                continue
            key = number, x.shape, x.dtype
            if key not in self._grads:
                self._grads[key] = torch.zeros_like(x, memory_format=torch.contiguous_format)
            found.append(self._grads[key])
        return tuple(found)

    def run_forward(self, slot: _Slot, place: int, stream: Tensors) -> _Recording:
        """Launch the forward of a layer's head."""
        made = slot.layers[place]
        _copy(made.begin, stream)
        assert made.forward is not None
        made.forward()
        return made

    def run_backward(self, slot: _Slot, place: int, grads: Tensors) -> Tensors:
        """Launch the backward of a head; return the gradients of stream and parameters."""
        made = slot.layers[place]
        # No gradient arrived for a result that the recorded backward reads: it is zero.
        for own, grad in zip(made.grad_outputs, grads, strict=True):
            if own is not None and grad is None:
                own.zero_()
        _copy(made.grad_outputs, grads)
        assert made.backward is not None
        made.backward()
        if place:
            return made.grads
        self._free.append(slot)
        # The pipeline may still be sending them when the next backward overwrites the memory.
        return tuple(x if x is None else x.clone() for x in made.grads)


class LayerRecorder:
    """The gradients of a step with layers launched as graphs; used as ``BackwardRecorder``."""

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
        """Wrap the layers of this rank, and take over which are recomputed whole.

        Args:
            chunks: of the model.
            data_parallel: holds weights and gradients.
            recorder: of graphs.
            num_warmup_steps: steps that come before recording: they compile, choose
                algorithms and connect ranks.
            casts: see ``LayerGraphs``.
            records_experts: whether experts are recorded too: no size depends on routing.
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
                self._places |= {module: (stack, at) for at, module in enumerate(modules)}
            chunk.recomputing, chunk.call_block = RecomputeConfig(), self._call_block

    def _call_block(self, block: nn.Module, stream: Residual, inputs: Any) -> Residual:
        """Run a block of the model; see ``StageModel.call_block``."""
        if block not in self._places:  # layers of multi-token prediction are not recorded
            return block(stream, inputs)
        stack, place = self._places[block]
        return stack.call(place, stream, inputs)

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
        if first != self._signature:
            self.forget()
            self._signature, self._num_left = first, self._num_warmup_steps
        elif self._num_left:
            self._num_left -= 1
        if self._num_left:
            return compute(batches)
        self._data_parallel.wait_params()  # gathers that began outside graphs
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
        made = graphs.run_forward(slot, place, tensors[:_NUM_STREAM])
        # The last layer's stream is copied: the model's head or a message keeps it for longer.
        is_last = place == len(graphs.layers) - 1
        found = tuple(
            x if x is None else x.clone() if is_last and n < _NUM_STREAM else x.detach()
            for n, x in enumerate(made.outputs)
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


def _written(to: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> Tensors:
    """Copy gradients into ``to``; return their copies, None where there is no gradient."""
    places = {x.data_ptr() for x in to if x is not None}
    # A gradient that lies in the memory of another target is moved out before any is written.
    apart = []
    for own, g in zip(to, grads, strict=True):
        is_elsewhere = own is None or g is None or g.data_ptr() not in places - {own.data_ptr()}
        apart.append(g if is_elsewhere else g.clone())
    _copy(to, apart)
    return tuple(None if g is None else own for own, g in zip(to, apart, strict=True))


def _tables(inputs: BlockInputs) -> tuple[Any, Any, Tensor | None]:
    return inputs.rotary, inputs.local_rotary, inputs.temperature


def _copy(to: Sequence[Tensor | None], new: Sequence[Tensor | None]) -> None:
    """Copy tensors into the memory that graphs read, unless they are there already."""
    with torch.no_grad():
        for own, x in zip(to, new, strict=True):
            if own is not None and x is not None and own.data_ptr() != x.data_ptr():
                own.copy_(x, non_blocking=True)


def layer_parts(
    layer: Any, streams: RngStreams, is_recomputed: bool, records_experts: bool
) -> LayerParts:
    """Split a layer into head and tail.

    Args:
        layer: a ``TransformerBlock``.
        streams: random streams of its dropout.
        is_recomputed: whether backward computes all of it again.
        records_experts: whether experts are recorded too; else they are the tail.
    """
    forward: Callable[[Residual, BlockInputs], Residual] = layer  # with its hooks

    def whole(stream: Residual, inputs: BlockInputs) -> tuple[Residual, None]:
        return layer.forward(stream, inputs), None  # a graph records no hooks

    head, tail, late = whole, _nothing, set()
    if not records_experts and layer.stops_at_experts:
        head, tail = layer.to_experts, layer.from_experts
        late = set(layer.moe.experts.parameters())
        if is_recomputed or "moe" in layer.recomputed:
            tail = partial(recompute, tail, streams=streams)
    if is_recomputed:
        forward, head = _recomputed(forward, streams), _recomputed(head, streams)
    parameters = [p for p in layer.parameters() if p.requires_grad and p not in late]
    return LayerParts(forward, head, tail, parameters)


def _nothing(stream: Residual, _: None) -> Residual:
    return stream


def _recomputed(function: Callable[..., Any], streams: RngStreams) -> Callable[..., Any]:
    """Return a function of a layer's input that keeps nothing else until backward."""

    def run(stream: Residual, inputs: BlockInputs) -> Any:
        def again(x: Tensor, aux: Tensor) -> Any:
            return function(Residual(x, None, aux), inputs)

        # The sum of the stream and its deferred add: one tensor is kept, not two.
        return recompute(again, stream.total(), stream.aux, streams=streams)

    return run
