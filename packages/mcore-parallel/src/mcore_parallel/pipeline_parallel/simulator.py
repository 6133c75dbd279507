"""A schedule, checked and timed without any device.

``simulate`` refuses a schedule that would compute wrong numbers or hang: an action missing
or done twice, data used before it came, messages that two ranks expect in different
orders, ranks that wait in a circle. Messages are rendezvous, the strictest thing a backend
may do: neither end continues before the other has arrived. Times follow the data alone: a
stage starts when its rank is free and its input is computed.
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
    """A computation and when it runs; both of a pair at one time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a schedule costs."""

    spans: list[list[Span]]
    """Computations of each rank, in order."""
    makespan: float
    """When the last rank ends."""
    peak_activations: list[int]
    """Most forwards that each rank holds for backward at one time; none without backward."""
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
) -> Simulation:
    """Check a schedule and time it.

    Args:
        schedule: one list of actions a rank.
        num_microbatches: of the step; each must pass every stage.
        num_chunks: stages on each rank.
        v_shaped: whether they lie in a V, see ``stages.stage_at``.
        durations: time of each kind of computation, or a function of rank and action where
            stages differ.
        message_time: from the end of a computation until another rank has its result.
        hidden_share: of the time of a pair, exchanges that run under computation.

    Raises:
        ValueError: if the schedule is wrong, saying which rank, which action and why.
    """
    places = Placement(len(schedule), num_chunks, v_shaped)
    _check_complete(schedule, num_microbatches, places)
    _check_order_on_ranks(schedule, places)
    _check_message_order(schedule, places)
    _check_rendezvous(schedule, places)
    duration = durations if callable(durations) else lambda _, action: durations[action.kind]
    spans = _time(schedule, places, duration, message_time, hidden_share)
    makespan = max((span.end for rank in spans for span in rank), default=0.0)
    busy = {(r, span.start, span.end) for r, rank in enumerate(spans) for span in rank}
    work = sum(end - start for _, start, end in busy)
    bubble = len(schedule) * makespan / work - 1.0 if work else 0.0
    return Simulation(spans, makespan, _peak_activations(schedule), bubble)


def _check_complete(schedule: Schedule, num_microbatches: int, places: Placement) -> None:
    """Each stage does for each micro-batch every required action once, and no other.

    Backward is whole or in halves, which may differ from one micro-batch to the next.
    """
    has_backward = any(a.kind in BACKWARDS for actions in schedule for a in actions)
    has_backward |= any(a.kind is Kind.BACKWARD_WEIGHT for r in schedule for a in r)
    for rank, actions in enumerate(schedule):
        counts = Counter(actions)
        wanted = set()
        for microbatch, chunk in product(range(num_microbatches), range(places.num_chunks)):
            kinds = {Kind.FORWARD, *_messages(rank, chunk, places, has_backward)}
            halves = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
            if any(Action(kind, microbatch, chunk) in counts for kind in halves):
                kinds |= set(halves)
            elif has_backward:
                kinds.add(Kind.BACKWARD)
            wanted |= {Action(kind, microbatch, chunk) for kind in kinds}
        for action in sorted(wanted - set(counts), key=str):
            raise ValueError(f"rank {rank} never does {action}")
        for action, count in counts.items():
            if action not in wanted:
                raise ValueError(f"rank {rank} does {action}, which is not its task")
            if count > 1:
                raise ValueError(f"rank {rank} does {action} {count} times")


def _messages(rank: int, chunk: int, places: Placement, has_backward: bool) -> set[Kind]:
    stage, kinds = places.stage(rank, chunk), set()
    if places.has(stage - 1) and places.rank(stage - 1) != rank:
        kinds |= {Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD}
    if places.has(stage + 1) and places.rank(stage + 1) != rank:
        kinds |= {Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD}
    if not has_backward:
        kinds -= {Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD}
    return kinds


def _check_order_on_ranks(schedule: Schedule, places: Placement) -> None:
    """Each rank receives or computes a value before it uses or sends it, none in a pair."""
    for rank, actions in enumerate(schedule):
        done: set[Action] = set()
        _check_pairs(rank, actions)
        for unit in action_units(actions):
            for action in unit:
                for kinds, chunk in _prerequisites(action.kind, rank, action.chunk, places):
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
    kind: Kind, rank: int, chunk: int, places: Placement
) -> list[tuple[tuple[Kind, ...], int]]:
    """List what must come first, and on which chunk; of each tuple one kind will do.

    What another rank computes must have been received, what this one computes, computed.
    """
    stage = places.stage(rank, chunk)

    def of(other: int, receive: Kind, compute: tuple[Kind, ...]) -> list:
        if not places.has(other):
            return []
        if places.rank(other) == rank:
            return [(compute, places.chunk(other))]
        return [((receive,), chunk)]

    if kind is Kind.FORWARD:
        return of(stage - 1, Kind.RECEIVE_FORWARD, (Kind.FORWARD,))
    if kind in BACKWARDS:
        return [((Kind.FORWARD,), chunk), *of(stage + 1, Kind.RECEIVE_BACKWARD, BACKWARDS)]
    own = {
        Kind.BACKWARD_WEIGHT: (Kind.BACKWARD_INPUT,),
        Kind.SEND_FORWARD: (Kind.FORWARD,),
        Kind.SEND_BACKWARD: BACKWARDS,
    }
    return [(own[kind], chunk)] if kind in own else []


Delivery = tuple[int, bool, int]
"""Stage that receives, whether it is a hidden state, micro-batch."""


def _check_message_order(schedule: Schedule, places: Placement) -> None:
    """Both ends see messages in one order, which is all that identifies them."""
    sent: dict[tuple[int, int], list[Delivery]] = defaultdict(list)  # by source and target
    received: dict[tuple[int, int], list[Delivery]] = defaultdict(list)
    for rank, actions in enumerate(schedule):
        for action in actions:
            kind, stage = action.kind, places.stage(rank, action.chunk)
            if not kind.is_message:
                continue
            is_forward = kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
            peer = message_peer(action, rank, places.pp, places.v_shaped)
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


def _check_rendezvous(schedule: Schedule, places: Placement) -> None:
    """No deadlock, even if ranks wait until each of their posted messages has a peer."""
    pp = len(schedule)
    runs = [
        [list(run) for is_message, run in groupby(r, lambda a: a.kind.is_message) if is_message]
        for r in schedule
    ]
    place = [-1] * pp  # the run of messages that each rank has posted
    posted: list[set[Action]] = [set() for _ in runs]
    unmet: list[set[Action]] = [set() for _ in runs]
    going_on = list(range(pp))
    while going_on:
        rank = going_on.pop()
        place[rank] += 1
        run = runs[rank][place[rank]] if place[rank] < len(runs[rank]) else []
        posted[rank], unmet[rank] = set(run), set(run)
        for action in run:
            peer, other = _other_end(action, rank, places)
            if other in posted[peer]:
                unmet[rank].discard(action)
                unmet[peer].discard(other)
                if not unmet[peer]:
                    going_on.append(peer)
        if run and not unmet[rank]:
            going_on.append(rank)
    waits = [f"rank {r} in {' '.join(sorted(map(str, a)))}" for r, a in enumerate(unmet) if a]
    if waits:
        raise ValueError(f"deadlock: {'; '.join(waits)}")


def _other_end(action: Action, rank: int, places: Placement) -> tuple[int, Action]:
    kind, step = {
        Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1),
        Kind.RECEIVE_FORWARD: (Kind.SEND_FORWARD, -1),
        Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1),
        Kind.RECEIVE_BACKWARD: (Kind.SEND_BACKWARD, 1),
    }[action.kind]
    other = places.stage(rank, action.chunk) + step
    return places.rank(other), Action(kind, action.microbatch, places.chunk(other))


def _time(
    schedule: Schedule,
    places: Placement,
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
        """When the action's input is there; None: not computed yet."""
        is_forward = action.kind is Kind.FORWARD
        other = places.stage(rank, action.chunk) + (-1 if is_forward else 1)
        if action.kind is Kind.BACKWARD_WEIGHT or not places.has(other):
            return 0.0
        end = ends.get((other, is_forward, action.microbatch))
        is_sent = places.rank(other) != rank
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
                shown = 1.0 if len(unit) == 1 else 1.0 - hidden_share
                end = start + shown * sum(duration(rank, action) for action in unit)
                for action in unit:
                    spans[rank].append(Span(action, start, end))
                    if action.kind is not Kind.BACKWARD_WEIGHT:
                        stage = places.stage(rank, action.chunk)
                        ends[stage, action.kind is Kind.FORWARD, action.microbatch] = end
    return spans


def _peak_activations(schedule: Schedule) -> list[int]:
    steps = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    if not any(action.kind in BACKWARDS for actions in schedule for action in actions):
        return [0] * len(schedule)
    peaks = []
    for actions in schedule:
        held = peak = 0
        for action in actions:
            held += steps.get(action.kind, 0)
            peak = max(peak, held)
        peaks.append(peak)
    return peaks
