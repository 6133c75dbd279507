"""Computes the waterfall of a step: its time divided into parts that add up to the step.

Every ``--waterfall-interval`` steps the context's ``StepClock`` records a step, which is read
at the next report, after the device has executed it. The borders of spans divide the step into
segments, and a segment belongs to the span that began last: a wait for other ranks is exposed
communication of its axis, reading batches is data, the update is optimizer, forward and
backward are compute, and time outside of all spans is host. On a GPU a segment of compute or
optimizer counts as host if the device had no launched work left at its end: then launches
limited its speed.

Waits for pipeline neighbours that the schedule explains are bubble. The simulator runs the
schedule with the times of this step's forwards and backwards, and with messages that take no
time; its idle time is the bubble.
"""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_parallel.data_parallel.gradient_noise import NoiseSquares, noise_and_signal
from mcore_parallel.pipeline_parallel.actions import Action
from mcore_parallel.pipeline_parallel.schedule import build_schedule
from mcore_parallel.pipeline_parallel.simulator import simulate
from mcore_parallel.step_clock import Recording
from mcore_train.assembly import Run

FIRST = 3
"""First recorded step of an attempt: earlier steps load kernels and connect ranks."""
AXES = ("tp", "cp", "pp", "ep", "dp", "world")
PARTS = ("compute", "optimizer", "data", "host", "bubble", "checkpoint")
"""Parts other than exposed communication, which has a part for each axis."""
IDLE = ("data", "host", "bubble", "checkpoint")
"""Parts in which a device neither computes nor communicates."""
SLOW = 1.2
"""Smallest ratio of a slow rank's work to the median of its peers."""
DELAY = 0.1
"""Smallest excess of a slow rank's work over this median, as a share of the step."""
MEMORY = 0.9
"""Factor of the running sums of noise and signal before a new measurement is added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waterfall:
    """Parts of one step: means over the ranks, in seconds."""

    iteration: int
    parts: Mapping[str, float]
    """Parts by name, ``PARTS`` and ``exposed_`` with an axis; they add up to ``step_s``."""
    step_s: float
    """Time of the step, with its share of the saves since the previous recorded step."""
    slow_rank: int
    """Global rank with the largest ratio of work to the median of its peers; -1 if the ratio is
    below ``SLOW``, or the difference below ``DELAY`` of a step."""
    slow_ratio: float
    """Largest ratio of a rank's work to the median of its peers; 0 without peers."""
    work_scores: Sequence[float] = ()
    """For each rank the median work of its peers over its work; 1 for a rank without peers, or
    if the difference is below ``DELAY`` of a step."""
    gradient_noise: float = float("nan")
    """Noise scale over the batch size; nan if it is not measured, infinite if the noise hides
    the signal."""
    num_noises: int = 0
    """Number of steps in the average of the noise scale."""
    ranks: Sequence[Mapping[str, float]] = ()
    """Parts of each rank, in the order of global ranks."""

    @property
    def communication_share(self) -> float:
        """Share of the step in which ranks wait for communication, without the bubble."""
        return sum(self.parts[f"exposed_{axis}"] for axis in AXES) / self.step_s

    @property
    def utilisation(self) -> float:
        """Share of the step in which devices compute or communicate with launched work ahead.

        Segments that launches limit count as idle, although short kernels run in them; the
        spans do not contain the time of these kernels.
        """
        return 1 - sum(self.parts[name] for name in IDLE) / self.step_s

    def numbers(self) -> dict[str, float | int]:
        """Return a flat table with stable keys."""
        return {
            "step_ms": 1e3 * self.step_s,
            **{f"{name}_ms": 1e3 * seconds for name, seconds in self.parts.items()},
            "communication_share": self.communication_share,
            "utilisation": self.utilisation,
            "gradient_noise": self.gradient_noise,
            "slow_rank": self.slow_rank,
            "slow_ratio": self.slow_ratio,
        }

    def line(self) -> str:
        """Format the parts as shares of the step, the largest first."""
        ranked = sorted(self.parts.items(), key=lambda part: -part[1])
        shares = [
            f"{name.replace('_', ' ')}: {100 * seconds / self.step_s:.1f}%"
            for name, seconds in ranked
            if seconds >= 5e-4 * self.step_s
        ]
        noise = self.gradient_noise
        ends = [f"gradient noise: {noise:.3g}"] if not math.isnan(noise) else []
        head = f"step {self.iteration} took (ms): {1e3 * self.step_s:.1f}"
        return " " + " | ".join([head, *shares, *ends]) + " |"


class StepWatch:
    """Records a step of a run at an interval, and builds its waterfall at the next report."""

    def __init__(self, run: Run) -> None:
        """Store the run and the interval; no communication."""
        self._run, self._clock = run, run.ctx.clock
        self._interval = run.plan.config.logging.waterfall_interval
        self._first = run.progress.iteration + FIRST
        self._calibrated = 0  # step that the clock was calibrated before
        self._recorded: tuple[int, Recording, NoiseSquares | None] | None = None
        self._saves_s, self._last_step = 0.0, run.progress.iteration
        self._noise = self._signal = 0.0
        self._num_noises = 0

    def is_due(self, step: int) -> bool:
        """Whether a step is recorded."""
        num_after_first = step - self._first
        is_after_first = self._interval > 0 and num_after_first >= 0
        return is_after_first and num_after_first % self._interval == 0

    def before(self, step: int) -> None:
        """Start recording if the step is due; waits for the device one step earlier."""
        is_due = self.is_due(step)
        # Calibrate also here: the previous step may have been left out (--iterations-to-skip).
        if self.is_due(step + 1) or (is_due and self._calibrated != step - 1):
            self._clock.calibrate()
            self._calibrated = step
        if is_due:
            self._clock.start()

    def after(self, step: int) -> None:
        """Stop recording if the step is due, without waiting for the device."""
        if self.is_due(step):
            squares = self._run.noise.take() if self._run.noise is not None else None
            self._recorded = step, self._clock.stop(), squares

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Add the time of a save, which is divided over the steps between two records."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._saves_s += time.perf_counter() - begin_s

    @property
    def has_recorded(self) -> bool:
        """Whether a step was recorded since the last report; equal on all ranks."""
        return self._recorded is not None

    def report(self) -> Waterfall:
        """Return the waterfall of the last recorded step; gathers numbers over the world.

        Call this after the device has executed the step.
        """
        assert self._recorded is not None
        step, recording, squares = self._recorded
        self._recorded = None
        parts, actions = rank_parts(recording)
        parts["checkpoint"] = self._saves_s / max(1, step - self._last_step)
        self._saves_s, self._last_step = 0.0, step
        own_record = {
            "parts": parts,
            "actions": actions,
            "stage": self._run.ctx.pp.rank,
            "squares": _numbers(squares),
        }
        ranks = gather_json(own_record, self._run.ctx.world)
        noise = self._noise_of([rank["squares"] for rank in ranks])
        stages = [rank["stage"] for rank in ranks]
        waterfall = build_waterfall(step, _split_bubbles(self._run, ranks), stages)
        return replace(waterfall, gradient_noise=noise, num_noises=self._num_noises)

    def _noise_of(self, squares: Sequence[Sequence[float]]) -> float:
        """Add a measurement to the averages of noise and signal; return their ratio, or nan.

        A step whose gradients overflowed is left out.
        """
        if not squares[0]:
            return float("nan")
        part, whole = (sum(rank[index] for rank in squares) for index in (0, 1))
        if not math.isfinite(part + whole):
            return float("nan")
        noise, signal = noise_and_signal(part, whole, int(squares[0][2]))
        self._noise = MEMORY * self._noise + noise
        self._signal = MEMORY * self._signal + signal
        self._num_noises += 1
        return self._noise / self._signal if self._signal > 0 else float("inf")


def rank_parts(recording: Recording) -> tuple[dict[str, float], dict[str, float]]:
    """Return the parts of a recorded step, and the mean time of each pipeline action.

    All waits for pipeline neighbours are in ``exposed_pp``; ``_split_bubbles`` divides them.
    The name of an action is its kind and chunk, such as ``F/0``; its time does not include
    waits for pipeline neighbours.
    """
    parts = dict.fromkeys((*PARTS, *(f"exposed_{axis}" for axis in AXES)), 0.0)
    times: dict[str, float] = defaultdict(float)
    for segment in recording.segments():
        part = _part(segment.names, is_paced=segment.is_paced)
        parts[part] += segment.length_s
        action = next((name for name in reversed(segment.names) if "/" in name), "")
        if action and part != "exposed_pp":
            times[action] += segment.length_s
    counts: dict[str, int] = defaultdict(int)
    for span in recording.spans:
        counts[span.name] += 1
    return parts, {name: seconds / counts[name] for name, seconds in times.items()}


def build_waterfall(
    iteration: int, ranks: Sequence[Mapping[str, float]], stages: Sequence[int]
) -> Waterfall:
    """Average the parts over ranks, and find the slowest rank.

    Args:
        iteration: recorded step.
        ranks: parts of each rank.
        stages: pipeline rank of each rank; ranks of one stage have equal work.
    """
    mean = {name: statistics.fmean(rank[name] for rank in ranks) for name in ranks[0]}
    slow_rank, slow_ratio, step_s = -1, 0.0, sum(mean.values())
    scores = [1.0] * len(ranks)
    work = [rank["compute"] + rank["optimizer"] + rank["host"] for rank in ranks]
    for number, stage in enumerate(stages):
        peers = [
            w for other, w in enumerate(work) if other != number and stages[other] == stage
        ]
        if peers and (median := statistics.median(peers)) > 0:
            ratio = work[number] / median
            is_late = work[number] - median > DELAY * step_s
            if is_late:
                scores[number] = 1 / ratio
            if ratio > slow_ratio:
                is_slow = ratio > SLOW and is_late
                slow_rank, slow_ratio = number if is_slow else -1, ratio
    return Waterfall(
        iteration=iteration,
        parts=mean,
        step_s=step_s,
        slow_rank=slow_rank,
        slow_ratio=slow_ratio,
        work_scores=scores,
        ranks=ranks,
    )


def _part(names: tuple[str, ...], *, is_paced: bool) -> str:
    """Return the part of a segment by its open spans."""
    inner = names[-1] if names else ""
    if "/" in inner or inner in ("compute", "optimizer"):
        if is_paced:
            return "host"
        return "optimizer" if inner == "optimizer" else "compute"
    if inner == "data":
        return "data"
    return f"exposed_{axis_of(inner)}" if inner else "host"


def axis_of(group: str) -> str:
    """Return the axis of a process group by its name, such as dp for cp_dp."""
    if group in ("dp", "cp_dp", "expert_dp") or "optimizer" in group:
        return "dp"
    if group in ("pp", "pp_back", "embedding_ends"):
        return "pp"
    if group == "tp" or group.startswith(("tp_block", "expert_tp")):
        return "tp"
    if group == "cp" or group.startswith(("cp_exchange", "cp_ring")):
        return "cp"
    if group == "ep" or group.startswith("ep_node"):
        return "ep"
    return "world"


def _split_bubbles(run: Run, ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Move the waits that the schedule explains from communication to the bubble of each rank.

    A stage that ends early waits in the next all-reduce over all ranks, so these waits can be
    bubble as well as waits for a neighbour. The simulation uses the mean times of each stage.
    """
    all_parts = [dict(rank["parts"]) for rank in ranks]
    pp = run.ctx.pp
    if pp.size == 1:
        return all_parts
    by_stage: dict[int, list[Mapping[str, float]]] = defaultdict(list)
    for rank in ranks:
        by_stage[rank["stage"]].append(rank["actions"])
    num_microbatches = max(n for kind, n in run.pipeline.built_actions if kind == "train")
    options = run.plan.config.pipeline

    def duration(stage: int, action: Action) -> float:
        name = f"{action.kind.value}/{action.chunk}"
        return statistics.fmean(times.get(name, 0.0) for times in by_stage[stage])

    simulation = simulate(
        build_schedule(options, pp.size, num_microbatches),
        num_microbatches=num_microbatches,
        num_chunks=options.num_chunks,
        v_shaped=options.v_shaped,
        durations=duration,
    )
    for rank, parts in zip(ranks, all_parts, strict=True):
        spans = {(span.start, span.end) for span in simulation.spans[rank["stage"]]}
        idle = simulation.makespan - sum(end - start for start, end in spans)
        for part in ("exposed_pp", "exposed_world"):
            moved = min(parts[part], idle)
            parts[part] -= moved
            parts["bubble"] += moved
            idle -= moved
    return all_parts


def _numbers(squares: NoiseSquares | None) -> list[float]:
    if squares is None:
        return []
    return [squares.part.item(), squares.whole.item(), squares.num_parts]
