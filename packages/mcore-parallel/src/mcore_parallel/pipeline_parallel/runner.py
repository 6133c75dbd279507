"""The runner: executes any schedule, one action or pair after the other.

A stage is a function from its input and the micro-batch number to its output, so the runner
does not depend on models. It waits for a received tensor only when a stage needs it, so
messages overlap with computation. Of an output that was sent it keeps the node of the autograd
graph, not the memory. On one rank a schedule has no messages.
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
from mcore_parallel.pipeline_parallel.p2p import Message, PendingMessages, post_by_way
from mcore_parallel.pipeline_parallel.stages import Placement
from mcore_parallel.pipeline_parallel.weight_queue import WeightQueue, Work, make_weights

SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
MAKING_WEIGHTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
_ONLY = ""
"""Name of a payload that is one tensor."""
MAX_POSTED = 2
"""Batches of messages on their way at one time: more would keep more sent memory alive."""

Payload = Tensor | Mapping[str, Tensor]
"""What stages send on: a hidden state, or several tensors by name; each gets a gradient."""

PayloadShape = tuple[int, ...] | Mapping[str, tuple[int, ...]]
"""Shape of a payload; names in the order of sending."""


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a stage computes for one micro-batch."""

    output: Payload
    """For the next stage; on the last one the scalar loss, already normalised."""
    extra: Shaped[Tensor, ""] | None = None
    """A second scalar root of backward (auxiliary losses), already weighted."""


StageFunction = Callable[[Any, int], StageOutput]
"""``f(x, microbatch)``; ``x`` is the ``Payload`` of the stage before, None on the first, which
reads its own batch."""


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
    """Run this rank's part of a schedule: gradients accumulate in the parameters.

    Args:
        actions: this rank's list of a schedule, ``schedule[axis.rank]``.
        chunks: stage functions of this rank by chunk number. A micro-batch without a
            backward action runs without gradient.
        axis: pipeline ranks; neighbours exchange hidden states and their gradients.
        back: the same ranks over a second group, for messages to lower ranks; None: ``axis``.
            nccl does what a group is given one after the other: over one, a message that a
            rank is to receive holds back those that it sends.
        shape: of every hidden state as this rank holds it (a sequence that context or tensor
            ranks cut is cut here), or of several tensors by name; or a function to it from
            the micro-batch and the stage that sends, counted in the order of the model.
        dtype: of every tensor that is sent.
        device: where hidden states live.
        before_last_backward: called with the chunk just before its last backward (or input
            half of one) here, such as ``DataParallel.start_sync``.
        before_last_weights: likewise before it makes the last weight gradients that were put
            off, such as ``DataParallel.start_weight_sync``.
        after_first_weights: called with the chunk once its parameters have the gradients of
            its first micro-batch alone.
        weight_queue: needed by schedules that split backward: what the linears fill. Under
            other schedules it is emptied after each backward.
        pair_overlap: runs a forward and a backward that the schedule pairs alternately; None:
            one after the other.
        v_shaped: whether chunks lie in a V, see ``stages.stage_at``; those that follow one
            another on a rank hand tensors over without a message.
        rendezvous: let the host wait for each batch of messages before it goes on. Needed
            the first time that stages run on CUDA: loading a kernel waits for the device,
            and a device that already waits for a neighbour's message makes a circle. Waiting
            for each cannot deadlock. Connections are opened first. No effect on CPU.
        overlap: send messages under computation; else wait for each after it is posted.
        batched: post consecutive messages as one operation; else one by one, so that a stage
            waits for its own input alone. Schedules of ``with_messages`` allow either.

    Raises:
        ValueError: if chunks, axis and actions do not fit, before any message; or if a
            stage's output is not the hidden state that was announced.
        TypeError: if actions are those of all ranks, or a stage returns no ``StageOutput``.
    """
    places = Placement(axis.size, len(chunks), v_shaped)
    _check_run(actions, chunks, axis, places, has_queue=weight_queue is not None)
    runner = _Runner(actions, chunks, (axis, back or axis), shape, dtype, device)
    runner.places = places
    if weight_queue is not None:
        runner.weight_queue = weight_queue
    runner.overlap, runner.batched = overlap, batched
    runner.rendezvous = rendezvous and torch.device(device).type == "cuda"
    if runner.rendezvous and axis.size > 1:
        runner.open_connections()
    calls = ((before_last_backward, BACKWARDS), (before_last_weights, MAKING_WEIGHTS))
    before = [(call, {a.chunk: a for a in actions if a.kind in kinds}) for call, kinds in calls]
    first = {a.chunk: a for a in reversed(actions) if a.kind in MAKING_WEIGHTS}
    for is_message, run in groupby(actions, lambda action: action.kind.is_message):
        if is_message:
            runner.exchange(list(run))
            continue
        for unit in action_units(run):
            for action, (call, last) in product(unit, before):
                if call is not None and action is last.get(action.chunk):
                    call(action.chunk)
            computations = [partial(runner.compute, action) for action in unit]
            if pair_overlap is not None and len(unit) == 2:
                pair_overlap.run(computations[1], computations[0], device)
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
        ways: tuple[Axis, Axis],
        shape: PayloadShape | Callable[[int, int], PayloadShape],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.chunks, self.axis, self.ways = chunks, ways[0], ways
        self.shape, self.dtype, self.device = shape, dtype, device
        self.weight_queue = WeightQueue()
        self.places = Placement(self.axis.size, len(chunks))
        self.rendezvous = False
        self.overlap = self.batched = True
        self.with_backward = {(a.chunk, a.microbatch) for a in actions if a.kind in BACKWARDS}
        self.pending: deque[list[PendingMessages]] = deque()
        self.arriving: dict[tuple[Kind, Key], dict[str, tuple[Tensor, PendingMessages]]] = {}
        self.leaving: dict[tuple[Kind, Key], list[Tensor]] = {}
        self.inputs: dict[Key, dict[str, Tensor]] = {}
        self.roots: dict[Key, list[tuple[GradientEdge, str | None]]] = {}
        self.deferred: dict[Key, list[Work]] = {}

    def open_connections(self) -> None:
        """Exchange a number with each neighbour, both ways at once.

        nccl connects two ranks when they first meet, and blocks the host until both are
        there: in the schedule itself one direction comes long before the other.
        """
        rank, size = self.axis.rank, self.axis.size
        messages = []
        for peer in sorted({(rank - 1) % size, (rank + 1) % size}):
            for is_send in (True, False):
                tensor = torch.zeros(1, dtype=self.dtype, device=self.device)
                messages.append(Message(tensor, peer, is_send))
        _wait(post_by_way(messages, *self.ways))
        torch.cuda.synchronize(self.device)

    def exchange(self, actions: Sequence[Action]) -> None:
        """Post consecutive messages, after waiting for the oldest beyond ``MAX_POSTED``."""
        while len(self.pending) >= MAX_POSTED:
            _wait(self.pending.popleft())
        messages: list[Message] = []
        received: list[tuple[tuple[Kind, Key], str] | None] = []  # what each message brings
        for action in actions:
            key = (action.kind, (action.chunk, action.microbatch))
            peer = message_peer(action, self.axis.rank, self.axis.size, self.places.v_shaped)
            if action.kind in SENDS:
                for tensor in self.leaving.pop(key):
                    messages.append(Message(tensor, peer, is_send=True))
                    received.append(None)
                continue
            is_forward = action.kind is Kind.RECEIVE_FORWARD
            shapes = self.shapes_of(action.microbatch, action.chunk, is_forward)
            for name, shape in shapes.items():
                tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
                messages.append(Message(tensor, peer, is_send=False))
                received.append((key, name))
        pending = post_by_way(messages, *self.ways, batched=self.batched)
        self.pending.append(pending)
        if self.rendezvous or not self.overlap:
            _wait(pending)
        if self.rendezvous:
            torch.cuda.synchronize(self.device)
        for place, message, on_its_way in zip(received, messages, pending, strict=True):
            if place is not None:
                key, name = place
                self.arriving.setdefault(key, {})[name] = (message.tensor, on_its_way)

    def compute(self, action: Action) -> None:
        """Do one forward, backward or half of a backward."""
        clock = self.axis.clock
        if clock is None or not clock.is_on:
            self.do(action)
            return
        with clock.span(f"{action.kind.value}/{action.chunk}"):
            self.do(action)

    def do(self, action: Action) -> None:
        """Do an action, in the span that the clock has for it."""
        key = (action.chunk, action.microbatch)
        if action.kind is Kind.FORWARD:
            with torch.set_grad_enabled(key in self.with_backward):
                self.forward(key)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            make_weights(self.deferred.pop(key))
        else:
            self.backward(key)
            works = self.weight_queue.take()
            if action.kind is Kind.BACKWARD_INPUT:
                self.deferred[key] = works
            elif works:
                make_weights(works)

    def forward(self, key: Key) -> None:
        """Run a stage and keep of its output only what backward and the next stage need."""
        chunk, microbatch = key
        stage, x = self.places.stage(self.axis.rank, chunk), None
        is_last = not self.places.has(stage + 1)
        if stage:
            x = self.received(Kind.RECEIVE_FORWARD, key)
            for tensor in x.values():
                tensor.requires_grad_(key in self.with_backward)
        found = self.chunks[chunk](None if x is None else _joined(x), microbatch)
        if not isinstance(found, StageOutput):
            raise TypeError(
                f"the function of chunk {chunk} returned {type(found).__name__}: it returns "
                "StageOutput(hidden state), on the last stage StageOutput(loss)"
            )
        output = _named(found.output)
        expected = {_ONLY: ()} if is_last else self.shapes_of(microbatch, chunk)
        self.check_output(output, expected, is_last)
        if not is_last:
            leaving = {name: output[name].detach().contiguous() for name in expected}
            self.hand_on(leaving, Kind.SEND_FORWARD, key)
        if key not in self.with_backward:
            return
        if x is not None:
            self.inputs[key] = x
        roots = self.roots[key] = []
        for name, tensor in output.items():
            if tensor.requires_grad:
                roots.append((get_gradient_edge(tensor), None if is_last else name))
        if found.extra is not None and found.extra.requires_grad:
            roots.append((get_gradient_edge(found.extra), None))

    def backward(self, key: Key) -> None:
        """Run backward from the stage's roots and make the input's gradient ready to send."""
        roots = self.roots.pop(key)
        received = {}
        if (Kind.RECEIVE_BACKWARD, key) in self.arriving:
            received = self.received(Kind.RECEIVE_BACKWARD, key)
        if roots:
            torch.autograd.backward(
                [edge for edge, _ in roots],
                # None for a scalar: torch makes the one. Given a tensor, it loads symbolic
                # shapes and sympy, 2 s of a CPU's first step.
                [None if name is None else received[name] for _, name in roots],
            )
        if key in self.inputs:
            leaving = {
                name: (torch.zeros_like(x) if x.grad is None else x.grad).contiguous()
                for name, x in self.inputs.pop(key).items()
            }
            self.hand_on(leaving, Kind.SEND_BACKWARD, key)

    def hand_on(self, tensors: dict[str, Tensor], kind: Kind, key: Key) -> None:
        """Keep a stage's result for its message, or give it to another stage of this rank."""
        chunk, microbatch = key
        other = self.places.stage(self.axis.rank, chunk)
        other += 1 if kind is Kind.SEND_FORWARD else -1
        if self.places.rank(other) != self.axis.rank:
            self.leaving[kind, key] = list(tensors.values())
            return
        forward = kind is Kind.SEND_FORWARD
        receive = Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD
        place = self.places.chunk(other), microbatch
        here = PendingMessages([], [], self.axis)
        self.arriving[receive, place] = {name: (x, here) for name, x in tensors.items()}

    def received(self, kind: Kind, key: Key) -> dict[str, Tensor]:
        """Return what a neighbour sent, by name, waiting for it if need be."""
        found = {}
        for name, (tensor, pending) in self.arriving.pop((kind, key)).items():
            pending.wait()
            found[name] = tensor
        return found

    def finish(self) -> None:
        """Wait for the last messages to leave."""
        for pending in self.pending:
            _wait(pending)

    def shapes_of(
        self, microbatch: int, chunk: int, is_received: bool = False
    ) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of what a chunk sends on, or receives, by name."""
        sender = self.places.stage(self.axis.rank, chunk) - is_received
        shape = self.shape(microbatch, sender) if callable(self.shape) else self.shape
        return shape if isinstance(shape, Mapping) else {_ONLY: shape}

    def check_output(
        self, output: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], is_last: bool
    ) -> None:
        """Refuse an output that the next rank would misread."""
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
            found = f"a stage returned {name} {tuple(tensor.shape)}".replace("  ", " ")
            found += f" {tensor.dtype} on {tensor.device.type}"
            if is_last:
                raise ValueError(f"{found} where the pipeline expects a scalar loss")
            raise ValueError(
                f"{found} where the pipeline expects {shape} {self.dtype} on {device}: give "
                "run_schedule the shape, dtype and device of a hidden state on this rank"
            )


def _named(payload: Payload) -> Mapping[str, Tensor]:
    return {_ONLY: payload} if isinstance(payload, Tensor) else payload


def _joined(tensors: Mapping[str, Tensor]) -> Payload:
    """Undo ``_named``."""
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
    places: Placement,
    *,
    has_queue: bool,
) -> None:
    """Refuse actions that are not this rank's, or need what is not given; see the runner.

    Args:
        actions: of a schedule.
        chunks: numbers of this rank's stages.
        axis: pipeline ranks.
        places: of stages on them.
        has_queue: whether weight gradients can be put off.
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
        stage = places.stage(axis.rank, chunk)
        ends = (Kind.RECEIVE_FORWARD, stage - 1), (Kind.SEND_FORWARD, stage + 1)
        if any(
            ((kind, chunk) in kinds) != (places.has(other) and places.rank(other) != axis.rank)
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
            "which linears put weight gradients into: give one, or use 1f1b or interleaved."
        )
