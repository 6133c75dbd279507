"""Checks and times a pipeline schedule without any device.

``simulate`` refuses a schedule that would compute wrong numbers or hang: an action that is
missing or repeated, data used before they arrive, messages that two ranks expect in different
orders, ranks that wait for each other in a circle. The deadlock check assumes rendezvous, the
strictest behaviour of a backend: neither end of a message continues before the other has
posted it. Times depend on data only: a computation starts when its rank is free and its input
has been computed.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product, zip_longest

from mcore_parallel.pipeline_parallel.actions import (
    DURATIONS,
    Action,
    Kind,
    Schedule,
    action_units,
    message_peer,
)
from mcore_parallel.pipeline_parallel.stages import Placement

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True)
class Span:
    """A computation with its start and end; the two of a pair have the same times."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """Times and memory of a schedule."""

    spans: list[list[Span]]
    """Computations of each rank, in order."""
    makespan: float
    """End of the last computation; the first starts at 0."""
    peak_activations: list[int]
    """Per rank, the most micro-batch chunks in memory for backward; 0 without backward."""
    bubble_fraction: float
    """Idle time of all ranks together, as a share of their work."""


def simulate(
    schedule: Schedule,
    *,
    num_microbatches: int,
    num_chunks: int = 1,
    v_shaped: bool = False,
    durations: Mapping[Kind, float] | Callable[[int, Action], float] = DURATIONS,
    message_time: float = 0.0,
    hidden_share: float = 0.0,
    check: bool = True,
) -> Simulation:
    """Check a schedule, and return its simulated times and memory.

    Args:
        schedule: one list of actions per rank.
        num_microbatches: micro-batches of the step; each must pass every stage.
        num_chunks: stages on each rank.
        v_shaped: whether stages are placed in a V, see ``stages.stage_at``.
        durations: time of each kind of computation, or a function of rank and action if stages
            differ.
        message_time: time from the end of a computation until another rank has its result.
        hidden_share: fraction of a pair's time that communication hidden under computation
            saves.
        check: false for the schedules of ``build_schedule``, which are right, where many are
            timed: checks take half the time.

    Raises:
        ValueError: if the schedule is wrong; names the rank, the action and the reason.
    """
    placement = Placement(len(schedule), num_chunks, v_shaped)
    if check:
        _check_complete(schedule, num_microbatches, placement)
        _check_order_on_ranks(schedule, placement)
        _check_message_order(schedule, placement)
        _check_rendezvous(schedule, placement)
    duration = durations if callable(durations) else lambda _, action: durations[action.kind]
    spans = _time(schedule, placement, duration, message_time, hidden_share)
    makespan = max((span.end for rank in spans for span in rank), default=0.0)
    # A set, so that the two spans of a pair count once.
    busy = {(r, span.start, span.end) for r, rank in enumerate(spans) for span in rank}
    work = sum(end - start for _, start, end in busy)
    bubble = len(schedule) * makespan / work - 1.0 if work else 0.0
    return Simulation(spans, makespan, _peak_activations(schedule), bubble)


def _check_complete(schedule: Schedule, num_microbatches: int, placement: Placement) -> None:
    """Check that each stage has every required action of each micro-batch once, and no other.

    Each micro-batch may have either one full backward or both halves.
    """
    has_backward = any(a.kind in BACKWARDS for actions in schedule for a in actions)
    has_backward |= any(a.kind is Kind.BACKWARD_WEIGHT for r in schedule for a in r)
    for rank, actions in enumerate(schedule):
        counts = Counter(actions)
        required = set()
        for microbatch, chunk in product(range(num_microbatches), range(placement.num_chunks)):
            kinds = {Kind.FORWARD, *_messages(rank, chunk, placement, has_backward)}
            halves = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
            if any(Action(kind, microbatch, chunk) in counts for kind in halves):
                kinds |= set(halves)
            elif has_backward:
                kinds.add(Kind.BACKWARD)
            required |= {Action(kind, microbatch, chunk) for kind in kinds}
        for action in sorted(required - set(counts), key=str):
            raise ValueError(f"rank {rank} never does {action}")
        for action, count in counts.items():
            if action not in required:
                raise ValueError(f"rank {rank} does {action}, which is not its task")
            if count > 1:
                raise ValueError(f"rank {rank} does {action} {count} times")


def _messages(rank: int, chunk: int, placement: Placement, has_backward: bool) -> set[Kind]:
    stage, kinds = placement.stage(rank, chunk), set()
    if placement.has(stage - 1) and placement.rank(stage - 1) != rank:
        kinds |= {Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD}
    if placement.has(stage + 1) and placement.rank(stage + 1) != rank:
        kinds |= {Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD}
    if not has_backward:
        kinds -= {Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD}
    return kinds


def _check_order_on_ranks(schedule: Schedule, placement: Placement) -> None:
    """Check that each rank has received or computed a value before using or sending it.

    The two actions of a pair may not need each other.
    """
    for rank, actions in enumerate(schedule):
        done: set[Action] = set()
        _check_pairs(rank, actions)
        for unit in action_units(actions):
            for action in unit:
                for kinds, chunk in _prerequisites(action.kind, rank, action.chunk, placement):
                    if not any(Action(k, action.microbatch, chunk) in done for k in kinds):
                        names = " or ".join(k.value for k in kinds)
                        of = f" of chunk {chunk}" if chunk != action.chunk else ""
                        raise ValueError(f"rank {rank} does {action} before its {names}{of}")
            done.update(unit)


def _check_pairs(rank: int, actions: Sequence[Action]) -> None:
    for action, follower in zip_longest(actions, actions[1:]):
        fits = follower is not None and follower.kind is Kind.BACKWARD
        if action.is_paired and not (action.kind is Kind.FORWARD and fits):
            raise ValueError(f"rank {rank} pairs {action} with {follower}, no backward")


def _prerequisites(
    kind: Kind, rank: int, chunk: int, placement: Placement
) -> list[tuple[tuple[Kind, ...], int]]:
    """Return the earlier actions that an action needs, as (alternative kinds, chunk).

    A value of another rank must have been received, a value of this rank computed.
    """
    stage = placement.stage(rank, chunk)

    def result_of(other: int, receive: Kind, compute: tuple[Kind, ...]) -> list:
        if not placement.has(other):
            return []
        if placement.rank(other) == rank:
            return [(compute, placement.chunk(other))]
        return [((receive,), chunk)]

    if kind is Kind.FORWARD:
        return result_of(stage - 1, Kind.RECEIVE_FORWARD, (Kind.FORWARD,))
    if kind in BACKWARDS:
        gradient = result_of(stage + 1, Kind.RECEIVE_BACKWARD, BACKWARDS)
        return [((Kind.FORWARD,), chunk), *gradient]
    producers = {
        Kind.BACKWARD_WEIGHT: (Kind.BACKWARD_INPUT,),
        Kind.SEND_FORWARD: (Kind.FORWARD,),
        Kind.SEND_BACKWARD: BACKWARDS,
    }
    return [(producers[kind], chunk)] if kind in producers else []


Delivery = tuple[int, bool, int]
"""Receiving stage, whether the message is a hidden state, micro-batch."""


def _check_message_order(schedule: Schedule, placement: Placement) -> None:
    """Check that both ends post their messages in the same order, which matches them."""
    sent: dict[tuple[int, int], list[Delivery]] = defaultdict(list)  # by source and target
    received: dict[tuple[int, int], list[Delivery]] = defaultdict(list)
    for rank, actions in enumerate(schedule):
        for action in actions:
            kind, stage = action.kind, placement.stage(rank, action.chunk)
            if not kind.is_message:
                continue
            is_forward = kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
            peer = message_peer(action, rank, placement.pp, placement.v_shaped)
            if kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                target = stage + (1 if is_forward else -1)
                sent[rank, peer].append((target, is_forward, action.microbatch))
            else:
                received[peer, rank].append((stage, is_forward, action.microbatch))
    for (source, target), ours in sent.items():
        for mine, theirs in zip(ours, received[source, target], strict=False):
            if mine != theirs:
                raise ValueError(
                    f"rank {source} sends to rank {target} {_describe(mine)} where "
                    f"{_describe(theirs)} is expected"
                )


def _describe(delivery: Delivery) -> str:
    stage, is_forward, microbatch = delivery
    what = "the input" if is_forward else "the gradient"
    return f"{what} of stage {stage}, micro-batch {microbatch},"


def _check_rendezvous(schedule: Schedule, placement: Placement) -> None:
    """Check that ranks cannot deadlock while they wait for peers to post messages.

    Each run of consecutive messages is posted at once. A rank posts its next run when every
    message of the current run has been posted at the other end too.
    """
    pp = len(schedule)
    runs = [
        [list(run) for is_message, run in groupby(r, lambda a: a.kind.is_message) if is_message]
        for r in schedule
    ]
    current = [-1] * pp  # index of the run that each rank has posted
    posted: list[set[Action]] = [set() for _ in runs]
    unmet: list[set[Action]] = [set() for _ in runs]
    ready = list(range(pp))  # ranks that can post their next run
    while ready:
        rank = ready.pop()
        current[rank] += 1
        run = runs[rank][current[rank]] if current[rank] < len(runs[rank]) else []
        posted[rank], unmet[rank] = set(run), set(run)
        for action in run:
            peer, other = _other_end(action, rank, placement)
            if other in posted[peer]:
                unmet[rank].discard(action)
                unmet[peer].discard(other)
                if not unmet[peer]:
                    ready.append(peer)
        if run and not unmet[rank]:
            ready.append(rank)
    waits = [f"rank {r} in {' '.join(sorted(map(str, a)))}" for r, a in enumerate(unmet) if a]
    if waits:
        raise ValueError(f"deadlock: {'; '.join(waits)}")


def _other_end(action: Action, rank: int, placement: Placement) -> tuple[int, Action]:
    kind, step = {
        Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1),
        Kind.RECEIVE_FORWARD: (Kind.SEND_FORWARD, -1),
        Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1),
        Kind.RECEIVE_BACKWARD: (Kind.SEND_BACKWARD, 1),
    }[action.kind]
    other = placement.stage(rank, action.chunk) + step
    return placement.rank(other), Action(kind, action.microbatch, placement.chunk(other))


def _time(
    schedule: Schedule,
    placement: Placement,
    duration: Callable[[int, Action], float],
    message_time: float,
    hidden_share: float,
) -> list[list[Span]]:
    orders = [
        list(action_units(a for a in actions if not a.kind.is_message))[::-1]
        for actions in schedule
    ]
    spans: list[list[Span]] = [[] for _ in schedule]
    ends: dict[tuple[int, bool, int], float] = {}  # stage, is forward, micro-batch

    def arrival(rank: int, action: Action) -> float | None:
        """Return the time at which the action's input is available; None: not computed yet."""
        is_forward = action.kind is Kind.FORWARD
        other = placement.stage(rank, action.chunk) + (-1 if is_forward else 1)
        if action.kind is Kind.BACKWARD_WEIGHT or not placement.has(other):
            return 0.0
        end = ends.get((other, is_forward, action.microbatch))
        is_sent = placement.rank(other) != rank
        return None if end is None else end + is_sent * message_time

    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                arrivals = [arrival(rank, action) for action in order[-1]]
                if None in arrivals:
                    break
                free = spans[rank][-1].end if spans[rank] else 0.0
                start = max([free, *(each for each in arrivals if each is not None)])
                unit = order.pop()
                visible = 1.0 if len(unit) == 1 else 1.0 - hidden_share
                end = start + visible * sum(duration(rank, action) for action in unit)
                for action in unit:
                    spans[rank].append(Span(action, start, end))
                    if action.kind is not Kind.BACKWARD_WEIGHT:
                        stage = placement.stage(rank, action.chunk)
                        ends[stage, action.kind is Kind.FORWARD, action.microbatch] = end
    return spans


def _peak_activations(schedule: Schedule) -> list[int]:
    steps = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    if not any(action.kind in BACKWARDS for actions in schedule for action in actions):
        return [0] * len(schedule)
    peaks = []
    for actions in schedule:
        num_held = peak = 0
        for action in actions:
            num_held += steps.get(action.kind, 0)
            peak = max(peak, num_held)
        peaks.append(peak)
    return peaks
