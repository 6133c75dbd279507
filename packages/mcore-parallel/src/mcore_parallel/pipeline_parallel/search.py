"""The fastest pipeline schedule that fits: all of them simulated with one set of costs.

Nothing is measured here and nothing is communicated: equal arguments give every rank the same
choice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mcore_parallel.pipeline_parallel.actions import Action, Kind
from mcore_parallel.pipeline_parallel.config import SCHEDULES, PipelineConfig
from mcore_parallel.pipeline_parallel.schedule import build_schedule
from mcore_parallel.pipeline_parallel.simulator import simulate
from mcore_parallel.pipeline_parallel.stages import Placement, build_stages

MOST_CHUNKS = 4
"""Stages on a rank up to which interleaving is tried."""
ROUNDS = 6
"""Simulated micro-batches, in pipeline ranks: what comes after repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Times of one micro-batch, in any one unit."""

    layer: Mapping[Kind, float]
    """Of one layer: ``FORWARD``, ``BACKWARD_INPUT`` and ``BACKWARD_WEIGHT``."""
    loss: Mapping[Kind, float]
    """Of head and loss, likewise."""
    message: float = 0.0
    """Of a hidden state from one rank to the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A schedule, and what it costs."""

    pipeline: PipelineConfig
    time: float = 0.0
    """Of a step's forwards and backwards, in the unit of ``Costs``."""
    bubble_fraction: float = 0.0
    """Idle time of all ranks as a share of their work."""
    memory_bytes: int = 0
    """Of the fullest rank."""
    problem: str = ""
    """Why it cannot be used; empty: it can."""

    @property
    def name(self) -> str:
        """The schedule, with its stages on a rank where one may choose them."""
        name, chunks = self.pipeline.pipeline_schedule, self.pipeline.num_chunks
        return f"{name} x {chunks}" if name == "interleaved" else name


def search_schedules(
    given: PipelineConfig,
    num_layers: int,
    pp: int,
    num_microbatches: int,
    costs: Costs,
    memory_of: Callable[[PipelineConfig], int],
    cap_bytes: float = float("inf"),
    problem_of: Callable[[PipelineConfig], str] = lambda _: "",
) -> list[Candidate]:
    """Simulate every schedule; the first candidate without a problem is the best.

    Args:
        given: how layers are shared out; its schedule, stages on a rank and groups are chosen.
        num_layers: of the whole model.
        pp: pipeline ranks.
        num_microbatches: of one step.
        costs: of layers, loss and messages.
        memory_of: bytes of the fullest rank.
        cap_bytes: that a rank may take.
        problem_of: any other reason against a schedule; empty: none.

    Returns:
        Candidates that can be used, fastest first, then the others.
    """
    found = []
    for pipeline in _pipelines(given):
        try:
            problem = problem_of(pipeline)
            time, bubble = step_times(pipeline, num_layers, pp, num_microbatches, costs)
            memory = memory_of(pipeline)
        except ValueError as error:
            found.append(Candidate(pipeline=pipeline, problem=str(error)))
            continue
        if not problem and memory > cap_bytes:
            problem = f"takes {memory / 2**30:.1f} GiB"
        found.append(
            Candidate(
                pipeline=pipeline,
                time=time,
                bubble_fraction=bubble,
                memory_bytes=memory,
                problem=problem,
            )
        )
    return sorted(found, key=lambda each: (bool(each.problem), each.time))


def search_table(candidates: list[Candidate], *, with_memory: bool = True) -> str:
    """Write candidates one a line: time beside the best's, bubble, memory, why not."""
    best = candidates[0].time if candidates and not candidates[0].problem else 0.0
    lines = [
        f"{'schedule':16}{'time':>8}{'bubble':>9}{'GiB' if with_memory else '':>8}".rstrip()
    ]
    for each in candidates:
        numbers = ["-", "-", "-"]
        if each.time:
            time = f"{each.time / best:.3f}" if best else "-"
            memory = f"{each.memory_bytes / 2**30:.1f}" if with_memory else ""
            numbers = [time, f"{each.bubble_fraction:.1%}", memory]
        line = f"{each.name:16}{numbers[0]:>8}{numbers[1]:>9}{numbers[2]:>8}"
        lines.append(f"{line}  {each.problem[:60]}".rstrip())
    return "\n".join(lines)


def _pipelines(given: PipelineConfig) -> list[PipelineConfig]:
    """List what is tried, simplest first: of equally fast ones the first is taken."""
    found = []
    for name in SCHEDULES:
        for chunks in range(2, MOST_CHUNKS + 1) if name == "interleaved" else (1,):
            found.append(
                replace(
                    given,
                    pipeline_schedule=name,
                    num_virtual_stages_per_pipeline_rank=chunks,
                    microbatch_group_size_per_virtual_pipeline_stage=0,
                    pipeline_memory_cap="",
                )
            )
    return found


def step_times(
    pipeline: PipelineConfig, num_layers: int, pp: int, num_microbatches: int, costs: Costs
) -> tuple[float, float]:
    """Return time and bubble of a step; of a long one a part is simulated."""
    stages = build_stages(pipeline, num_layers, pp)
    places = Placement(pp, pipeline.num_chunks, pipeline.v_shaped)
    few = min(num_microbatches, ROUNDS * pp + num_microbatches % pp)

    def of(stage: int, kind: Kind) -> float:
        own = len(stages[stage].layers) + stages[stage].num_mtp_layers
        return own * costs.layer[kind] + stages[stage].has_loss * costs.loss[kind]

    def duration(rank: int, action: Action) -> float:
        stage = places.stage(rank, action.chunk)
        halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        kinds = halves if action.kind is Kind.BACKWARD else (action.kind,)
        return sum(of(stage, kind) for kind in kinds)

    simulation = simulate(
        build_schedule(pipeline, pp, few),
        num_microbatches=few,
        num_chunks=pipeline.num_chunks,
        v_shaped=pipeline.v_shaped,
        durations=duration,
        message_time=costs.message,
    )
    work = [sum(span.end - span.start for span in spans) for spans in simulation.spans]
    time = simulation.makespan + (num_microbatches - few) * max(work) / few
    total = sum(work) * num_microbatches / few
    return time, pp * time / total - 1.0
