"""Actions of a pipeline schedule: computations of a rank, and messages between ranks.

``with_messages`` adds sends and receives to each rank's order of computation. Consecutive
messages are posted together, so that ranks that exchange both ways do not wait in a circle.

``stages.stage_at`` maps a chunk of a rank to its stage.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mcore_parallel.pipeline_parallel.stages import rank_and_chunk, stage_at


class Kind(StrEnum):
    """What an action does. Messages of forward carry hidden states, of backward gradients."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    """Gradients of the stage's input only; weight gradients wait in a queue."""
    BACKWARD_WEIGHT = "W"
    """The weight gradients that ``BACKWARD_INPUT`` of the same micro-batch left."""
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"

    @property
    def is_message(self) -> bool:
        """Whether it is communication, not computation."""
        return len(self.value) == 2


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank."""

    kind: Kind
    microbatch: int
    chunk: int = 0
    """Which of the rank's own stages."""
    is_paired: bool = field(default=False, compare=False)
    """Of a forward: it and the next action, a backward, run as a pair
    (``ForwardBackwardOverlap``)."""

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.value}{self.microbatch}{chunk}{'&' * self.is_paired}"


Schedule = list[list[Action]]
"""One list a pipeline rank."""

DURATIONS = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}
"""Time units by which messages are placed: each half of backward costs one forward."""


def action_units(actions: Iterable[Action]) -> Iterator[tuple[Action, ...]]:
    """Yield what runs at one time: an action, or a forward and its interleaved backward."""
    left = iter(actions)
    for action in left:
        yield (action, next(left)) if action.is_paired else (action,)


def message_peer(action: Action, rank: int, pp: int, v_shaped: bool = False) -> int:
    """Return the pipeline rank at the other end of a message."""
    step = 1 if action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD) else -1
    return rank_and_chunk(stage_at(rank, action.chunk, pp, v_shaped) + step, pp, v_shaped)[0]


def with_messages(orders: Sequence[Sequence[Action]], v_shaped: bool = False) -> Schedule:
    """Add sends and receives to each rank's order of computation.

    Simulates the orders with ``DURATIONS`` and adds a message at both ends when its producer
    ends. All ranks thereby share one order of messages, which cannot deadlock, and a receive
    is posted as early as its message can arrive. Stages of one rank need no messages.

    Args:
        orders: computations of each rank.
        v_shaped: whether the second chunks run back, see ``stages.stage_at``.

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
    """List what must have been computed before ``action`` of a stage can start."""
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
    """Append the message of the computation that just ended on ``rank``, if it has one."""
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
