"""Finds the fastest pipeline schedule that fits in memory, by simulating all of them.

Nothing is measured and nothing is communicated: equal arguments give every rank the same
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
"""Largest number of stages per rank for which interleaving is tried."""
ROUNDS = 6
"""Simulated micro-batches per pipeline rank; the time of further ones is extrapolated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Times of one micro-batch, in any one unit."""

    layer: Mapping[Kind, float]
    """Time of one layer for ``FORWARD``, ``BACKWARD_INPUT`` and ``BACKWARD_WEIGHT``."""
    loss: Mapping[Kind, float]
    """Time of head and loss for the same kinds."""
    message: float = 0.0
    """Time to send a hidden state from one rank to the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A schedule with its simulated time and its memory."""

    pipeline: PipelineConfig
    time: float = 0.0
    """Time of a step's forwards and backwards, in the unit of ``Costs``."""
    bubble_fraction: float = 0.0
    """Idle time of all ranks as a share of their work."""
    memory_bytes: int = 0
    """Memory of the rank that needs most."""
    problem: str = ""
    """Why the schedule cannot be used; empty: it can."""

    @property
    def name(self) -> str:
        """Name of the schedule, for ``interleaved`` with the number of stages per rank."""
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
    """Simulate every schedule; return usable candidates, fastest first, then the others.

    Args:
        given: options of the layer split; schedule, stages per rank and groups are varied.
        num_layers: layers of the model.
        pp: pipeline ranks.
        num_microbatches: micro-batches of a step.
        costs: times of layers, loss and messages.
        memory_of: maps a candidate to the bytes of the rank that needs most.
        cap_bytes: bytes that a rank may use.
        problem_of: maps a candidate to another reason against it; empty: none.
    """
    candidates = []
    for pipeline in _pipelines(given):
        try:
            problem = problem_of(pipeline)
            time, bubble = step_times(pipeline, num_layers, pp, num_microbatches, costs)
            memory = memory_of(pipeline)
        except ValueError as error:
            candidates.append(Candidate(pipeline=pipeline, problem=str(error)))
            continue
        if not problem and memory > cap_bytes:
            problem = f"takes {memory / 2**30:.1f} GiB"
        candidates.append(
            Candidate(
                pipeline=pipeline,
                time=time,
                bubble_fraction=bubble,
                memory_bytes=memory,
                problem=problem,
            )
        )
    return sorted(candidates, key=lambda each: (bool(each.problem), each.time))


def search_table(candidates: list[Candidate], *, with_memory: bool = True) -> str:
    """Format candidates as a table: relative time, bubble, memory and problem."""
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
    """List the candidates, simplest first: sorting keeps this order at equal times."""
    pipelines = []
    for name in SCHEDULES:
        for chunks in range(2, MOST_CHUNKS + 1) if name == "interleaved" else (1,):
            pipelines.append(
                replace(
                    given,
                    pipeline_schedule=name,
                    num_virtual_stages_per_pipeline_rank=chunks,
                    microbatch_group_size_per_virtual_pipeline_stage=0,
                    pipeline_memory_cap="",
                )
            )
    return pipelines


def step_times(
    pipeline: PipelineConfig, num_layers: int, pp: int, num_microbatches: int, costs: Costs
) -> tuple[float, float]:
    """Return the time and the bubble of a step, extrapolated for many micro-batches."""
    stages = build_stages(pipeline, num_layers, pp)
    placement = Placement(pp, pipeline.num_chunks, pipeline.v_shaped)
    few = min(num_microbatches, ROUNDS * pp + num_microbatches % pp)

    def stage_time(stage: int, kind: Kind) -> float:
        num_stage_layers = len(stages[stage].layers) + stages[stage].num_mtp_layers
        return num_stage_layers * costs.layer[kind] + stages[stage].has_loss * costs.loss[kind]

    def duration(rank: int, action: Action) -> float:
        stage = placement.stage(rank, action.chunk)
        halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        kinds = halves if action.kind is Kind.BACKWARD else (action.kind,)
        return sum(stage_time(stage, kind) for kind in kinds)

    simulation = simulate(
        build_schedule(pipeline, pp, few),
        num_microbatches=few,
        num_chunks=pipeline.num_chunks,
        v_shaped=pipeline.v_shaped,
        durations=duration,
        message_time=costs.message,
        check=False,
    )
    work = [sum(span.end - span.start for span in spans) for spans in simulation.spans]
    # In the steady state each further micro-batch takes the work of the busiest rank.
    time = simulation.makespan + (num_microbatches - few) * max(work) / few
    total = sum(work) * num_microbatches / few
    return time, pp * time / total - 1.0
