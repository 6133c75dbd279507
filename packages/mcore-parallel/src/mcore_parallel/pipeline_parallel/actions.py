"""Actions of a pipeline schedule: computations of a rank, and messages between ranks.

``with_messages`` adds sends and receives to each rank's order of computation. The runner posts
consecutive messages together, so ranks that exchange in both directions do not deadlock.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mcore_parallel.pipeline_parallel.stages import rank_and_chunk, stage_at


class Kind(StrEnum):
    """Kind of an action. Forward messages carry hidden states, backward messages gradients."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    """Gradient of the stage's input only; weight gradients are deferred to a queue."""
    BACKWARD_WEIGHT = "W"
    """The weight gradients that ``BACKWARD_INPUT`` of the same micro-batch deferred."""
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"

    @property
    def is_message(self) -> bool:
        """Whether the action is communication, not computation."""
        return len(self.value) == 2


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank."""

    kind: Kind
    microbatch: int
    chunk: int = 0
    """Number of the stage among the rank's stages."""
    is_paired: bool = field(default=False, compare=False)
    """Whether this forward runs together with the next action, a backward
    (``ForwardBackwardOverlap``)."""

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.value}{self.microbatch}{chunk}{'&' * self.is_paired}"


Schedule = list[list[Action]]
"""One list of actions per pipeline rank."""

DURATIONS = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}
"""Time units for placing messages: each half of backward takes as long as forward."""


def action_units(actions: Iterable[Action]) -> Iterator[tuple[Action, ...]]:
    """Yield single actions, and each paired forward together with its backward."""
    remaining = iter(actions)
    for action in remaining:
        yield (action, next(remaining)) if action.is_paired else (action,)


def message_peer(action: Action, rank: int, pp: int, v_shaped: bool = False) -> int:
    """Return the pipeline rank at the other end of a message."""
    step = 1 if action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD) else -1
    return rank_and_chunk(stage_at(rank, action.chunk, pp, v_shaped) + step, pp, v_shaped)[0]


def with_messages(orders: Sequence[Sequence[Action]], v_shaped: bool = False) -> Schedule:
    """Return a schedule: each rank's order of computation with sends and receives added.

    Simulates the orders with ``DURATIONS``. When a computation ends, its message is appended to
    the schedules of the sender and the receiver. So all ranks have one global order of
    messages, which cannot deadlock, and a receive is posted as early as its message can arrive.
    Stages on one rank exchange no messages.

    Args:
        orders: computations of each rank.
        v_shaped: whether stages are placed in a V, see ``stages.stage_at``.

    Raises:
        ValueError: if the orders wait for each other.
    """
    pp = len(orders)
    num_stages = pp * (1 + max((a.chunk for order in orders for a in order), default=0))
    waiting = [list(action_units(order))[::-1] for order in orders]
    schedule: Schedule = [[] for _ in orders]
    arrived: set[Value] = set()
    running: list[tuple[float, int, tuple[Action, ...]]] = []  # (end, rank, unit)
    idle = set(range(pp))
    now = 0.0

    def needs(rank: int, unit: tuple[Action, ...]) -> set[Value]:
        stages = [stage_at(rank, action.chunk, pp, v_shaped) for action in unit]
        return set().union(*map(_needs, unit, stages, [num_stages] * len(unit)))

    while True:
        # Start the next computation of every idle rank whose inputs have arrived.
        for rank in sorted(idle):
            order = waiting[rank]
            if order and needs(rank, order[-1]) <= arrived:
                unit = order.pop()
                schedule[rank] += unit
                end = now + sum(DURATIONS[action.kind] for action in unit)
                heapq.heappush(running, (end, rank, unit))
                idle.discard(rank)
        if not running:
            break
        # Advance to the next end, and deliver the results of all computations that end then.
        now = running[0][0]
        while running and running[0][0] == now:
            _, rank, unit = heapq.heappop(running)
            for action in unit:
                arrived |= _deliver(schedule, rank, action, num_stages, v_shaped)
            idle.add(rank)
    if any(waiting):
        stuck = ", ".join(f"rank {r} at {o[-1][0]}" for r, o in enumerate(waiting) if o)
        raise ValueError(f"the orders of computation wait for each other: {stuck}")
    return schedule


Value = tuple[int, Kind, int]
"""The result of a computation: stage, kind of computation, micro-batch."""


def _needs(action: Action, stage: int, num_stages: int) -> set[Value]:
    """Return the results that ``action`` of a stage needs as inputs."""
    microbatch = action.microbatch
    if action.kind is Kind.FORWARD:
        return {(stage - 1, Kind.FORWARD, microbatch)} if stage else set()
    if action.kind is Kind.BACKWARD_WEIGHT:
        return {(stage, Kind.BACKWARD, microbatch)}
    later = {(stage + 1, Kind.BACKWARD, microbatch)} if stage < num_stages - 1 else set()
    return {(stage, Kind.FORWARD, microbatch)} | later


def _deliver(
    schedule: Schedule, rank: int, action: Action, num_stages: int, v_shaped: bool
) -> set[Value]:
    """Append the ended computation's message to both ranks' schedules; return its result."""
    pp = len(schedule)
    stage, microbatch = stage_at(rank, action.chunk, pp, v_shaped), action.microbatch
    if action.kind is Kind.BACKWARD_WEIGHT:
        return set()
    is_forward = action.kind is Kind.FORWARD
    target = stage + 1 if is_forward else stage - 1
    peer, chunk = (
        rank_and_chunk(target, pp, v_shaped) if 0 <= target < num_stages else (rank, 0)
    )
    if peer != rank:
        send = Kind.SEND_FORWARD if is_forward else Kind.SEND_BACKWARD
        receive = Kind.RECEIVE_FORWARD if is_forward else Kind.RECEIVE_BACKWARD
        schedule[rank].append(Action(send, microbatch, action.chunk))
        schedule[peer].append(Action(receive, microbatch, chunk))
    return {(stage, Kind.FORWARD if is_forward else Kind.BACKWARD, microbatch)}
