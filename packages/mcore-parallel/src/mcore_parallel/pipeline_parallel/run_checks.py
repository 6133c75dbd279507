"""What a runner refuses before its first message."""

from collections.abc import Collection, Sequence

from mcore_parallel.mesh import Axis
from mcore_parallel.pipeline_parallel.actions import Action, Kind
from mcore_parallel.pipeline_parallel.stages import Placement


def check_run(
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
