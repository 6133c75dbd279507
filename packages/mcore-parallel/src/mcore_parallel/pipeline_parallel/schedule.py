"""Pipeline schedules as data: what each rank does, in order.

A schedule is one list of ``Action`` a rank. The order of computation is a few lines per
schedule, as in the paper's figure; ``with_messages`` adds sends and receives. Messages that
stand next to one another are posted together, so that ranks that exchange both ways do
not wait in a circle. ``simulator`` checks any schedule, ``runner`` executes it.

Stage ``chunk * PP + rank`` is chunk ``chunk`` of rank ``rank``.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mcore_parallel.config import PipelineConfig


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

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Schedule = list[list[Action]]
"""One list a pipeline rank."""

DURATIONS = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}
"""Time units by which messages are placed: each half of backward costs one forward."""


def build_schedule(config: PipelineConfig, pp: int, num_microbatches: int) -> Schedule:
    """Return the schedule that the config names; empty: by the number of stages on a rank.

    Args:
        config: schedule, stages on a rank and size of groups.
        pp: pipeline ranks.
        num_microbatches: of one step, on each data rank.

    Returns:
        One list of actions a rank; ``run_schedule`` takes that of its own rank.

    Raises:
        ValueError: if micro-batches, groups and stages do not fit the pipeline.
    """
    name = _name(config)
    if name == "interleaved":
        vpp = config.num_virtual_stages_per_pipeline_rank
        group = config.microbatch_group_size_per_virtual_pipeline_stage
        return interleaved(pp, num_microbatches, vpp, group)
    if name == "zb-h1":
        return zero_bubble_h1(pp, num_microbatches)
    return one_f_one_b(pp, num_microbatches)


def check_schedule(config: PipelineConfig, pp: int, num_microbatches: int) -> None:
    """Raise what ``build_schedule`` raises, without building; cheap for many batch sizes.

    Raises:
        ValueError: if micro-batches, groups and stages do not fit the pipeline.
    """
    if _name(config) == "interleaved":
        vpp = config.num_virtual_stages_per_pipeline_rank
        group = config.microbatch_group_size_per_virtual_pipeline_stage or pp
        _check_groups(pp, num_microbatches, vpp, group)


def one_f_one_b(pp: int, num_microbatches: int) -> Schedule:
    """One forward, one backward: ranks hold at most PP - rank micro-batches.

    Reference:
        Narayanan et al. 2021, arXiv:2104.04473, figure 3 (PipeDream-Flush).
    """
    orders = []
    for rank in range(pp):
        warmup = min(pp - rank - 1, num_microbatches)
        order = [Action(Kind.FORWARD, i) for i in range(warmup)]
        for i in range(num_microbatches):
            if i + warmup < num_microbatches:
                order.append(Action(Kind.FORWARD, i + warmup))
            order.append(Action(Kind.BACKWARD, i))
        orders.append(order)
    return with_messages(orders)


def interleaved(pp: int, num_microbatches: int, vpp: int, group: int = 0) -> Schedule:
    """1F1B over VPP stages a rank: the bubble shrinks by VPP, messages grow by it.

    Micro-batches go in groups: a group passes the first chunk, then the second, and so on,
    before the next group starts. Backward takes the chunks in reverse.

    Args:
        pp: pipeline ranks, 2 or more when ``vpp`` is.
        num_microbatches: of one step; a last, smaller group must still fill the pipeline.
        vpp: stages on each rank.
        group: micro-batches in a group, PP or more; 0 means PP.

    Raises:
        ValueError: if micro-batches and group do not fit the pipeline.

    Reference:
        Narayanan et al. 2021, arXiv:2104.04473, figure 4.
    """
    group = group or pp
    _check_groups(pp, num_microbatches, vpp, group)
    table = [
        (chunk, microbatch)
        for begin in range(0, num_microbatches, group)
        for chunk in range(vpp)
        for microbatch in range(begin, min(begin + group, num_microbatches))
    ]
    forwards = [Action(Kind.FORWARD, microbatch, chunk) for chunk, microbatch in table]
    backwards = [Action(Kind.BACKWARD, m, vpp - 1 - chunk) for chunk, m in table]
    orders = []
    for rank in range(pp):
        warmup = min(2 * (pp - rank - 1) + (vpp - 1) * group, len(table))
        order = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += [forward, backward]
        orders.append(order + backwards[len(table) - warmup :])
    return with_messages(orders)


def zero_bubble_h1(pp: int, num_microbatches: int) -> Schedule:
    """1F1B with backward in two halves: weight halves fill the bubble, memory as in 1F1B.

    Rank ``r`` runs the weight half ``r`` micro-batches behind the input half, so that
    input gradients go upstream at once, and every rank holds at most PP micro-batches.

    Reference:
        Qi et al. 2023, arXiv:2401.10241, section 2.3 and figure 2 (ZB-H1).
    """
    orders = []
    for rank in range(pp):
        warmup = min(pp - rank - 1, num_microbatches)
        order = [Action(Kind.FORWARD, i) for i in range(warmup)]
        for i in range(num_microbatches + rank):
            if i + warmup < num_microbatches:
                order.append(Action(Kind.FORWARD, i + warmup))
            if i < num_microbatches:
                order.append(Action(Kind.BACKWARD_INPUT, i))
            if i >= rank:
                order.append(Action(Kind.BACKWARD_WEIGHT, i - rank))
        orders.append(order)
    return with_messages(orders)


def forward_only(pp: int, num_microbatches: int, vpp: int = 1) -> Schedule:
    """All forwards and no backward, for evaluation; chunks in turn for each group of PP."""
    order = [
        Action(Kind.FORWARD, microbatch, chunk)
        for begin in range(0, num_microbatches, pp)
        for chunk in range(vpp)
        for microbatch in range(begin, min(begin + pp, num_microbatches))
    ]
    return with_messages([list(order) for _ in range(pp)])


def message_peer(kind: Kind, rank: int, pp: int) -> int:
    """Return the pipeline rank at the other end of a message."""
    forward = kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)
    return (rank + 1) % pp if forward else (rank - 1) % pp


def with_messages(orders: Sequence[Sequence[Action]]) -> Schedule:
    """Add sends and receives to each rank's order of computation.

    Simulates the orders with ``DURATIONS`` and adds a message at both ends when its producer
    ends. All ranks thereby share one order of messages, which cannot deadlock, and a receive
    is posted as early as its message can arrive.

    Raises:
        ValueError: if the orders wait for each other.
    """
    pp = len(orders)
    num_stages = pp * (1 + max((a.chunk for order in orders for a in order), default=0))
    waiting = [list(reversed(order)) for order in orders]
    schedule: Schedule = [[] for _ in orders]
    arrived: set[tuple[int, Kind, int]] = set()
    running: list[tuple[float, int, Action]] = []  # (end, rank, action)
    idle = set(range(pp))
    now = 0.0
    while True:
        for rank in sorted(idle):
            order = waiting[rank]
            if order and _needs(order[-1], rank, pp, num_stages) <= arrived:
                action = order.pop()
                schedule[rank].append(action)
                heapq.heappush(running, (now + DURATIONS[action.kind], rank, action))
                idle.discard(rank)
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] == now:
            _, rank, action = heapq.heappop(running)
            arrived |= _deliver(schedule, rank, action, num_stages)
            idle.add(rank)
    if any(waiting):
        stuck = ", ".join(f"rank {r} at {o[-1]}" for r, o in enumerate(waiting) if o)
        raise ValueError(f"the orders of computation wait for each other: {stuck}")
    return schedule


Value = tuple[int, Kind, int]
"""The result of a computation: stage, kind of computation, micro-batch."""


def _needs(action: Action, rank: int, pp: int, num_stages: int) -> set[Value]:
    """List what must have been computed before ``action`` can start."""
    stage, microbatch = action.chunk * pp + rank, action.microbatch
    if action.kind is Kind.FORWARD:
        return {(stage - 1, Kind.FORWARD, microbatch)} if stage else set()
    if action.kind is Kind.BACKWARD_WEIGHT:
        return {(stage, Kind.BACKWARD, microbatch)}
    later = {(stage + 1, Kind.BACKWARD, microbatch)} if stage < num_stages - 1 else set()
    return {(stage, Kind.FORWARD, microbatch)} | later


def _deliver(schedule: Schedule, rank: int, action: Action, num_stages: int) -> set[Value]:
    """Append the message of the computation that just ended on ``rank``, if it has one."""
    pp = len(schedule)
    stage, microbatch = action.chunk * pp + rank, action.microbatch
    if action.kind is Kind.BACKWARD_WEIGHT:
        return set()
    is_forward = action.kind is Kind.FORWARD
    target = stage + 1 if is_forward else stage - 1
    if 0 <= target < num_stages:
        send = Kind.SEND_FORWARD if is_forward else Kind.SEND_BACKWARD
        receive = Kind.RECEIVE_FORWARD if is_forward else Kind.RECEIVE_BACKWARD
        schedule[rank].append(Action(send, microbatch, action.chunk))
        schedule[target % pp].append(Action(receive, microbatch, target // pp))
    return {(stage, Kind.FORWARD if is_forward else Kind.BACKWARD, microbatch)}


def _name(config: PipelineConfig) -> str:
    is_interleaved = config.num_virtual_stages_per_pipeline_rank > 1
    return config.pipeline_schedule or ("interleaved" if is_interleaved else "1f1b")


def _check_groups(pp: int, num_microbatches: int, vpp: int, group: int) -> None:
    if vpp > 1 and pp == 1:
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {vpp} needs "
            "--pipeline-model-parallel-size 2 or more."
        )
    if group < pp:
        raise ValueError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} must be at least "
            f"--pipeline-model-parallel-size {pp}."
        )
    rest = num_microbatches % group
    if num_microbatches < pp or 0 < rest < pp:
        raise ValueError(
            f"{num_microbatches} micro-batches in groups of {group} leave a group of {rest}, "
            f"which cannot fill {pp} pipeline ranks: use a multiple of {group} micro-batches "
            "(--global-batch-size), or change "
            "--microbatch-group-size-per-virtual-pipeline-stage."
        )
