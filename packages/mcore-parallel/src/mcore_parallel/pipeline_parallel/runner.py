"""Executes any pipeline schedule: the list of actions of one rank, in order.

A stage is a function from its input and the micro-batch number to its output, so the runner
does not depend on models. ``run_schedule`` is the loop. Consecutive messages go to
``_Runner.exchange``, which posts them; computations go to ``forward``, ``backward`` and the
weight queue. The runner waits for a received tensor only when a stage reads it, so messages
overlap with computation. For backward it keeps the output's node of the autograd graph and not
the output: the tensor is freed once it is sent.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.pipeline_parallel.actions import Action, Kind, action_units, message_peer
from mcore_parallel.pipeline_parallel.forward_backward_overlap import ForwardBackwardOverlap
from mcore_parallel.pipeline_parallel.p2p import Message, PendingMessages, post_by_direction
from mcore_parallel.pipeline_parallel.stages import Placement
from mcore_parallel.pipeline_parallel.weight_queue import WeightQueue, Work, make_weights

SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
MAKING_WEIGHTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
_ONLY = ""
"""Name of the tensor in a payload of a single tensor."""
MAX_POSTED = 2
"""Batches of messages in flight at one time; sent tensors stay in memory until they arrive."""

Payload = Tensor | Mapping[str, Tensor]
"""Output of a stage for the next stage: a hidden state, or several tensors by name."""

PayloadShape = tuple[int, ...] | Mapping[str, tuple[int, ...]]
"""Shape of a payload, or shapes by name in the order of sending."""


@dataclass(frozen=True, slots=True)
class StageOutput:
    """Result of a stage's forward for one micro-batch."""

    output: Payload
    """Input of the next stage; on the last stage the scalar loss, already normalised."""
    extra: Shaped[Tensor, ""] | None = None
    """A second scalar root of backward (auxiliary losses), already weighted."""


StageFunction = Callable[[Any, int], StageOutput]
"""``f(x, microbatch)``; ``x`` is the ``Payload`` of the previous stage, None on the first
stage, which reads its own batch."""


def run_schedule(
    actions: Sequence[Action],
    chunks: Mapping[int, StageFunction],
    axis: Axis = SINGLE,
    *,
    back: Axis | None = None,
    shape: PayloadShape | Callable[[int, int], PayloadShape] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    before_last_backward: Callable[[int], None] | None = None,
    before_last_weights: Callable[[int], None] | None = None,
    after_first_weights: Callable[[int], None] | None = None,
    weight_queue: WeightQueue | None = None,
    pair_overlap: ForwardBackwardOverlap | None = None,
    v_shaped: bool = False,
    rendezvous: bool = False,
    overlap: bool = True,
    batched: bool = True,
) -> None:
    """Run this rank's part of a schedule; gradients accumulate in the parameters.

    Args:
        actions: this rank's list of a schedule, ``schedule[axis.rank]``.
        chunks: stage functions of this rank by chunk number. A micro-batch without a
            backward action runs without gradient.
        axis: pipeline ranks; neighbours exchange hidden states and their gradients.
        back: the same ranks with a second process group, for messages to lower ranks; None:
            ``axis``. nccl runs the operations of one group in order, so that with one group a
            pending receive would delay sends in the other direction.
        shape: local shape of every hidden state (already split over context and tensor
            ranks), or shapes of several tensors by name; or a function that returns these for
            a micro-batch and a sending stage, counted in the order of the model.
        dtype: dtype of every tensor that is sent.
        device: device of the hidden states.
        before_last_backward: called with a chunk's number just before the chunk's last
            backward (or input half) on this rank, such as ``DataParallel.start_sync``.
        before_last_weights: called just before the chunk's last deferred weight gradients are
            computed, such as ``DataParallel.start_weight_sync``.
        after_first_weights: called with a chunk's number once its parameters have the gradients
            of the first micro-batch alone.
        weight_queue: queue that the linears fill; required by schedules that split backward.
            Under other schedules the runner empties the queue after each backward.
        pair_overlap: runs the forward and the backward of each pair alternately; None: one
            after the other.
        v_shaped: whether chunks are placed in a V, see ``stages.stage_at``. Consecutive stages
            on one rank pass tensors without a message.
        rendezvous: make the host wait for each batch of messages, which cannot deadlock.
            Needed the first time that stages run on CUDA: loading a kernel waits for the
            device, and if the device waits for a neighbour's message at that time, ranks wait
            in a circle. Connections are opened first. No effect on the CPU.
        overlap: overlap messages with computation; else wait for each where it is posted.
        batched: post consecutive messages as one operation; else one by one, so that a stage
            waits for its own input only. Schedules of ``with_messages`` allow both.

    Raises:
        ValueError: before any message, if chunks, axis and actions do not fit; later if a
            stage's output has another shape, dtype or device than declared.
        TypeError: if actions are those of all ranks, or a stage returns no ``StageOutput``.
    """
    placement = Placement(axis.size, len(chunks), v_shaped)
    _check_run(actions, chunks, axis, placement, has_queue=weight_queue is not None)
    runner = _Runner(actions, chunks, (axis, back or axis), shape, dtype, device)
    runner.placement = placement
    if weight_queue is not None:
        runner.weight_queue = weight_queue
    runner.overlap, runner.batched = overlap, batched
    runner.rendezvous = rendezvous and torch.device(device).type == "cuda"
    if runner.rendezvous and axis.size > 1:
        runner.open_connections()
    # For each callback and chunk, the last action of the callback's kinds: entries of later
    # actions overwrite those of earlier ones.
    callbacks = ((before_last_backward, BACKWARDS), (before_last_weights, MAKING_WEIGHTS))
    callbacks_before = [
        (callback, {a.chunk: a for a in actions if a.kind in kinds})
        for callback, kinds in callbacks
    ]
    # For each chunk, the first action that computes weight gradients.
    first = {a.chunk: a for a in reversed(actions) if a.kind in MAKING_WEIGHTS}
    for is_message, run in groupby(actions, lambda action: action.kind.is_message):
        if is_message:
            runner.exchange(list(run))
            continue
        for unit in action_units(run):
            # A unit is one action, or a forward paired with the backward after it.
            for action, (callback, last) in product(unit, callbacks_before):
                if callback is not None and action is last.get(action.chunk):
                    callback(action.chunk)
            computations = [partial(runner.compute, action) for action in unit]
            if pair_overlap is not None and len(unit) == 2:
                pair_overlap.run(computations[1], computations[0], device)  # backward, forward
            else:
                for compute in computations:
                    compute()
            for action in unit:
                if after_first_weights is not None and action is first.get(action.chunk):
                    after_first_weights(action.chunk)
    runner.finish()


Key = tuple[int, int]
"""Chunk and micro-batch."""


class _Runner:
    """One execution of a schedule: the activations and messages in flight on this rank."""

    def __init__(
        self,
        actions: Sequence[Action],
        chunks: Mapping[int, StageFunction],
        directions: tuple[Axis, Axis],
        shape: PayloadShape | Callable[[int, int], PayloadShape],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.chunks, self.axis, self.directions = chunks, directions[0], directions
        self.shape, self.dtype, self.device = shape, dtype, device
        self.weight_queue = WeightQueue()
        self.placement = Placement(self.axis.size, len(chunks))
        self.rendezvous = False
        self.overlap = self.batched = True
        self.with_backward = {(a.chunk, a.microbatch) for a in actions if a.kind in BACKWARDS}
        # Batches of messages in flight, oldest first.
        self.pending: deque[list[PendingMessages]] = deque()
        # By the kind, chunk and micro-batch of a message: tensors that are arriving, each with
        # its pending message; results of computations that are not sent yet.
        self.to_receive: dict[tuple[Kind, Key], dict[str, tuple[Tensor, PendingMessages]]] = {}
        self.to_send: dict[tuple[Kind, Key], list[Tensor]] = {}
        # Kept from forward to backward: the stage's input, whose .grad is sent back, and the
        # roots of backward, each with the name of the received gradient (None: a scalar loss,
        # whose gradient is 1).
        self.inputs: dict[Key, dict[str, Tensor]] = {}
        self.roots: dict[Key, list[tuple[GradientEdge, str | None]]] = {}
        # Weight gradients that BACKWARD_INPUT has left to BACKWARD_WEIGHT.
        self.deferred: dict[Key, list[Work]] = {}

    def open_connections(self) -> None:
        """Exchange a number with each neighbour, in both directions at once.

        nccl connects two ranks at their first message, and blocks the host of each until the
        other one calls too. In a schedule the first message of one direction comes long before
        that of the other direction, so ranks would wait for each other.
        """
        rank, size = self.axis.rank, self.axis.size
        messages = []
        for peer in sorted({(rank - 1) % size, (rank + 1) % size}):
            for is_send in (True, False):
                tensor = torch.zeros(1, dtype=self.dtype, device=self.device)
                messages.append(Message(tensor, peer, is_send))
        _wait(post_by_direction(messages, *self.directions))
        torch.cuda.synchronize(self.device)

    def exchange(self, actions: Sequence[Action]) -> None:
        """Post a run of consecutive messages, at most ``MAX_POSTED`` runs at a time."""
        while len(self.pending) >= MAX_POSTED:
            _wait(self.pending.popleft())
        messages: list[Message] = []
        # For each message the receive action and the tensor's name; None for a send.
        received: list[tuple[tuple[Kind, Key], str] | None] = []
        for action in actions:
            key = (action.kind, (action.chunk, action.microbatch))
            peer = message_peer(action, self.axis.rank, self.axis.size, self.placement.v_shaped)
            if action.kind in SENDS:
                for tensor in self.to_send.pop(key):
                    messages.append(Message(tensor, peer, is_send=True))
                    received.append(None)
                continue
            is_forward = action.kind is Kind.RECEIVE_FORWARD
            shapes = self.shapes_of(action.microbatch, action.chunk, is_forward)
            for name, shape in shapes.items():
                tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
                messages.append(Message(tensor, peer, is_send=False))
                received.append((key, name))
        pending = post_by_direction(messages, *self.directions, batched=self.batched)
        self.pending.append(pending)
        if self.rendezvous or not self.overlap:
            _wait(pending)
        if self.rendezvous:
            torch.cuda.synchronize(self.device)
        for target, message, in_flight in zip(received, messages, pending, strict=True):
            if target is not None:
                key, name = target
                self.to_receive.setdefault(key, {})[name] = (message.tensor, in_flight)

    def compute(self, action: Action) -> None:
        """Run one forward, full backward, input half or weight half."""
        clock = self.axis.clock
        if clock is None or not clock.is_on:
            self.run_action(action)
            return
        with clock.span(f"{action.kind.value}/{action.chunk}"):
            self.run_action(action)

    def run_action(self, action: Action) -> None:
        """Run one action without timing it."""
        key = (action.chunk, action.microbatch)
        if action.kind is Kind.FORWARD:
            with torch.set_grad_enabled(key in self.with_backward):
                self.forward(key)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            make_weights(self.deferred.pop(key))
        else:
            self.backward(key)
            # What the linears have deferred in this backward. A schedule that does not split
            # backward computes it now; BACKWARD_INPUT keeps it for BACKWARD_WEIGHT.
            works = self.weight_queue.take()
            if action.kind is Kind.BACKWARD_INPUT:
                self.deferred[key] = works
            elif works:
                make_weights(works)

    def forward(self, key: Key) -> None:
        """Run a stage, and store the tensors to send and the graph nodes for backward."""
        chunk, microbatch = key
        stage, x = self.placement.stage(self.axis.rank, chunk), None
        is_last = not self.placement.has(stage + 1)
        if stage:
            x = self.receive(Kind.RECEIVE_FORWARD, key)
            for tensor in x.values():  # leaves, so that backward fills their .grad
                tensor.requires_grad_(key in self.with_backward)
        result = self.chunks[chunk](None if x is None else _as_payload(x), microbatch)
        if not isinstance(result, StageOutput):
            raise TypeError(
                f"the function of chunk {chunk} returned {type(result).__name__}: it must "
                "return StageOutput(hidden state), on the last stage StageOutput(loss)"
            )
        output = _by_name(result.output)
        expected = {_ONLY: ()} if is_last else self.shapes_of(microbatch, chunk)
        self.check_output(output, expected, is_last)
        if not is_last:
            results = {name: output[name].detach().contiguous() for name in expected}
            self.pass_result(results, Kind.SEND_FORWARD, key)
        if key not in self.with_backward:
            return
        if x is not None:
            self.inputs[key] = x
        roots = self.roots[key] = []
        for name, tensor in output.items():
            if tensor.requires_grad:
                roots.append((get_gradient_edge(tensor), None if is_last else name))
        if result.extra is not None and result.extra.requires_grad:
            roots.append((get_gradient_edge(result.extra), None))

    def backward(self, key: Key) -> None:
        """Run backward from the stage's roots, and store the input's gradient to send."""
        roots = self.roots.pop(key)
        received = {}
        if (Kind.RECEIVE_BACKWARD, key) in self.to_receive:
            received = self.receive(Kind.RECEIVE_BACKWARD, key)
        if roots:
            torch.autograd.backward(
                [edge for edge, _ in roots],
                # None for a scalar: torch then creates the 1. Given a tensor, torch would
                # import symbolic shapes and sympy, 2 s in the first step on a CPU.
                [None if name is None else received[name] for _, name in roots],
            )
        if key in self.inputs:
            results = {
                name: (torch.zeros_like(x) if x.grad is None else x.grad).contiguous()
                for name, x in self.inputs.pop(key).items()
            }
            self.pass_result(results, Kind.SEND_BACKWARD, key)

    def pass_result(self, tensors: dict[str, Tensor], kind: Kind, key: Key) -> None:
        """Store a stage's result for its message, or pass it to another stage of this rank."""
        chunk, microbatch = key
        # The stage that reads the result: the next one, or the previous one for a gradient.
        other = self.placement.stage(self.axis.rank, chunk)
        other += 1 if kind is Kind.SEND_FORWARD else -1
        if self.placement.rank(other) != self.axis.rank:
            self.to_send[kind, key] = list(tensors.values())
            return
        # Both stages are on this rank (the turning point of a V): no message.
        forward = kind is Kind.SEND_FORWARD
        receive = Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD
        target = self.placement.chunk(other), microbatch
        arrived = PendingMessages([], [], self.axis)
        self.to_receive[receive, target] = {name: (x, arrived) for name, x in tensors.items()}

    def receive(self, kind: Kind, key: Key) -> dict[str, Tensor]:
        """Wait for a neighbour's tensors and return them by name."""
        tensors = {}
        for name, (tensor, pending) in self.to_receive.pop((kind, key)).items():
            pending.wait()
            tensors[name] = tensor
        return tensors

    def finish(self) -> None:
        """Wait for all messages in flight."""
        for pending in self.pending:
            _wait(pending)

    def shapes_of(
        self, microbatch: int, chunk: int, is_received: bool = False
    ) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors that a chunk sends, or receives, by name."""
        sender = self.placement.stage(self.axis.rank, chunk) - is_received
        shape = self.shape(microbatch, sender) if callable(self.shape) else self.shape
        return shape if isinstance(shape, Mapping) else {_ONLY: shape}

    def check_output(
        self, output: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], is_last: bool
    ) -> None:
        """Raise if names, shapes, dtype or device of an output differ from those declared."""
        if set(output) != set(shapes):
            raise ValueError(
                f"a stage returned {_listed(output)} where the pipeline expects "
                f"{_listed(shapes)}: name the same tensors in run_schedule's shape"
            )
        device = torch.device(self.device).type
        for name, tensor in output.items():
            shape = tuple(shapes[name])
            fits = is_last or (tensor.dtype, tensor.device.type) == (self.dtype, device)
            if tuple(tensor.shape) == shape and fits:
                continue
            returned = f"a stage returned {name} {tuple(tensor.shape)}".replace("  ", " ")
            returned += f" {tensor.dtype} on {tensor.device.type}"
            if is_last:
                raise ValueError(f"{returned} where the pipeline expects a scalar loss")
            raise ValueError(
                f"{returned} where the pipeline expects {shape} {self.dtype} on {device}: give "
                "run_schedule the shape, dtype and device of a hidden state on this rank"
            )


def _by_name(payload: Payload) -> Mapping[str, Tensor]:
    return {_ONLY: payload} if isinstance(payload, Tensor) else payload


def _as_payload(tensors: Mapping[str, Tensor]) -> Payload:
    """Undo ``_by_name``."""
    return tensors.get(_ONLY, tensors)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name or "one tensor" for name in names)


def _wait(pending: list[PendingMessages]) -> None:
    for messages in pending:
        messages.wait()


def _check_run(
    actions: Sequence[Action],
    chunks: Collection[int],
    axis: Axis,
    placement: Placement,
    *,
    has_queue: bool,
) -> None:
    """Raise if the actions are not this rank's, or need stages or a queue that are missing.

    Args:
        actions: actions of this rank.
        chunks: numbers of this rank's stages.
        axis: pipeline ranks.
        placement: placement of the stages on the ranks.
        has_queue: whether weight gradients can be deferred.
    """
    if not all(isinstance(action, Action) for action in actions):
        raise TypeError(
            "run_schedule takes the actions of this rank: schedule[axis.rank], not the schedule"
        )
    named = {action.chunk for action in actions}
    if named != set(chunks):
        raise ValueError(
            f"the schedule runs chunks {sorted(named)}, but functions are given for "
            f"{sorted(chunks)}"
        )
    kinds = {(action.kind, action.chunk) for action in actions}
    for chunk in chunks:
        stage = placement.stage(axis.rank, chunk)
        ends = (Kind.RECEIVE_FORWARD, stage - 1), (Kind.SEND_FORWARD, stage + 1)
        if any(
            ((kind, chunk) in kinds)
            != (placement.has(other) and placement.rank(other) != axis.rank)
            for kind, other in ends
        ):
            raise ValueError(
                f"these actions of chunk {chunk} are not those of rank {axis.rank} of "
                f"{axis.size}: build the schedule for {axis.size} pipeline ranks and take "
                "schedule[axis.rank]"
            )
    if not has_queue and any(a.kind is Kind.BACKWARD_WEIGHT for a in actions):
        raise ValueError(
            "a schedule that splits backward (zb-h1, zb-v, dualpipev) needs a weight_queue, "
            "to which linears defer weight gradients: pass one, or use 1f1b or interleaved."
        )
