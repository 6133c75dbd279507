"""``mcore-train doctor RUN``: reads the metrics of a run, names the flag most likely to help.

``RULES`` cover the usual problems of large-model training: memory, a loss that oscillates or
does not fall, low efficiency, vanishing gradients, imbalance of experts. Rules on memory and
time predict their options with the planner (``planning.gain``) and name the best one. The
planner has no model of the loss, so rules on the loss have no predicted gain.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from mcore_train.diagnosis.memory_remedies import MemoryRecord, cheapest_remedy
from mcore_train.diagnosis.planned_run import PlannedRun, plan_run
from mcore_train.diagnosis.triage import triage
from mcore_train.planning.gain import Gain, faster_changes, shorter_bubbles
from mcore_train.planning.memory import GIB
from mcore_train.planning.system import system_of_device
from mcore_train.reporting.log import METRICS, read_metrics

LEAST_REPORTS = 8
"""Smallest number of reports for a rule on a trend."""
GOOD_MFU = 0.4
"""Model FLOPs utilization below which a run is reported."""
JUMP = 0.2
"""Relative rise of the loss that counts as a jump."""
NOISE = 0.05
"""Relative standard deviation of the loss about its trend that counts as oscillation."""
VANISHING = 1e-3
"""Late over early gradient norm below which gradients count as vanished."""
FULL_SHARE = 0.92
"""Share of a GPU's memory above which a run is reported."""
LARGE_BUBBLE = 0.1
"""Share of the pipeline bubble in a step above which a run is reported."""
LEAST_GAIN = 0.01
"""Smallest predicted gain in tokens per second of an option that is named."""
SLOWER = 1.15
"""Measured over predicted step time above which the cluster, not the options, is suspected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Facts of a run folder."""

    reports: Sequence[Mapping[str, Any]] = ()
    """Rows of kind ``train``, in order."""
    header: Mapping[str, Any] = field(default_factory=dict)
    """Row of kind ``run``: layout, devices, format."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that differ from their defaults, by field."""
    fault: str = ""
    """Class of the failure by triage of the logs; "" without logs."""
    advice: str = ""
    """Advice of triage."""
    memory: MemoryRecord | None = None
    """Memory of a run out of GPU memory, by triage."""
    planned: PlannedRun | None = None
    """Inputs of the planner; None if the planner cannot predict the run."""
    unplanned: str = ""
    """Reason why the planner cannot predict the run."""

    def option(self, name: str, default: Any = 0) -> Any:
        """Return an option of the run."""
        return self.options.get(name, default)

    def degree(self, axis: str) -> int:
        """Return the degree of an axis of the header's layout."""
        return self.header.get("layout", {}).get(axis, 1)

    def series(self, name: str) -> list[float]:
        """Return the finite values of one number over the reports."""
        values = [row.get(name) for row in self.reports]
        return [v for v in values if isinstance(v, int | float) and math.isfinite(v)]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One problem of a run."""

    name: str
    seen: str
    """Numbers that show the problem."""
    flag: str
    """Option most likely to help."""
    why: str
    """Effect of the option."""
    gain: str = ""
    """Gain of the option, by the planner or by the numbers of the run, or the reason why it
    cannot be predicted."""


Rule = Callable[[RunFacts], Diagnosis | None]
OF_THE_LOSS = "not predicted: the planner models time and memory, not the loss"


def read_run(folder: Path) -> RunFacts:
    """Read metrics, recipe and logs of a run folder.

    Raises:
        FileNotFoundError: if the folder does not exist.
        ValueError: if the folder has neither metrics nor logs.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist: give the --save folder of a run.")
    rows = read_metrics(folder / METRICS)
    logs = [p for p in folder.rglob("*") if p.suffix in (".log", ".err", ".out")]
    if not rows and not logs:
        raise ValueError(
            f"{folder} holds no {METRICS} and no logs: give the --save folder of a run."
        )
    verdict = triage(folder) if logs else None
    headers = [row for row in rows if row["kind"] == "run"]
    header = headers[-1] if headers else {}
    options = header.get("options", {})
    planned, unplanned = None, ""
    try:
        planned = plan_run(header, options)
    except (ValueError, OSError) as error:  # such as an unknown GPU or a missing tokenizer
        unplanned = str(error).splitlines()[0]
    return RunFacts(
        reports=[row for row in rows if row["kind"] == "train"],
        header=header,
        options=options,
        fault=verdict.fault if verdict else "",
        advice=verdict.advice if verdict else "",
        memory=verdict.memory if verdict else None,
        planned=planned,
        unplanned=unplanned,
    )


def _ended(run: RunFacts) -> Diagnosis | None:
    if run.fault in ("", "finished", "unknown", "out_of_memory"):
        return None
    return Diagnosis("ended", f"the logs end with {run.fault}", "", run.advice)


def _memory(run: RunFacts) -> Diagnosis | None:
    peak = max(run.series("peak_gib"), default=0.0)
    capacity = _capacity_gib(run)
    is_out = run.fault == "out_of_memory"
    if not is_out and not (capacity and peak > FULL_SHARE * capacity):
        return None
    seen = "out of memory" if is_out else f"{peak:.1f} of {capacity:.0f} GiB in use"
    record = run.memory or MemoryRecord(
        layout=dict(run.header.get("layout", {})),
        sharding=_sharding(run),
        recompute=run.option("recompute_granularity", ""),
        micro_batch_size=run.option("micro_batch_size", 1),
    )
    flag, _, why = cheapest_remedy(record).partition(": ")
    if flag.startswith("PYTORCH_ALLOC_CONF") or record.phase in ("save", "validation"):
        gain = "not predicted: the planner only counts the allocations of a training step"
        return Diagnosis("memory", seen, flag, why, gain)
    if run.planned is None:
        return Diagnosis("memory", seen, flag, why, _no_prediction(run))
    needed = (record.requested_gib or 0.0) if is_out else peak - FULL_SHARE * capacity
    best = run.planned.cheapest_saving(needed * GIB)
    if best is None:
        why = "no single option saves 5 %: mcore-train plan searches whole layouts"
        return Diagnosis("memory", seen, "", why)
    is_enough = best.saved_bytes >= needed * GIB
    why = "saves enough at the least cost in time" if is_enough else "saves most, not enough"
    return Diagnosis("memory", seen, best.flags, why, best.describe())


def _sharding(run: RunFacts) -> str:
    strategy = run.option("data_parallel_sharding_strategy", "no_shard")
    return "optim" if run.option("use_distributed_optimizer", False) else strategy


def _capacity_gib(run: RunFacts) -> float:
    system = system_of_device(next(iter(run.header.get("devices", {})), ""))
    return system.memory_gib if system else 0.0


def _not_finite(run: RunFacts) -> Diagnosis | None:
    bad = [row["iteration"] for row in run.reports if row.get("loss", 0.0) is None]
    if not bad:
        return None
    return Diagnosis(
        "loss not finite",
        f"at step {bad[0]}",
        "--lr",
        "half of it, from the checkpoint before; --clip-grad 1.0 if it is off",
        OF_THE_LOSS,
    )


def _jumping(run: RunFacts) -> Diagnosis | None:
    losses = run.series("loss")
    if len(losses) < LEAST_REPORTS:
        return None
    lowest, jumps = losses[0], 0
    for loss in losses[1:]:
        jumps += loss > (1 + JUMP) * lowest
        lowest = min(lowest, loss)
    half = losses[len(losses) // 2 :]
    steps = [b - a for a, b in pairwise(half)]
    noise = statistics.pstdev(steps) / statistics.fmean(half) if len(steps) > 1 else 0.0
    if not jumps and noise < NOISE:
        return None
    seen = f"{jumps} reports more than {100 * JUMP:.0f} % above the lowest, noise {noise:.2f}"
    warmup = run.option("lr_warmup_iters") or run.option("lr_warmup_samples")
    warmup = warmup or run.option("lr_warmup_fraction")
    if not warmup:
        why = "the run has no warm-up; 1 to 2 % of the steps"
        return Diagnosis("oscillating loss", seen, "--lr-warmup-iters", why, OF_THE_LOSS)
    if not run.option("clip_grad", 1.0):
        why = "the norm is not limited"
        return Diagnosis("oscillating loss", seen, "--clip-grad 1.0", why, OF_THE_LOSS)
    lr = run.option("lr", 0.0)
    why = f"half of {lr:g}"
    return Diagnosis("oscillating loss", seen, f"--lr {lr / 2:g}", why, OF_THE_LOSS)


def _vanishing(run: RunFacts) -> Diagnosis | None:
    norms = run.series("grad_norm")
    if len(norms) < LEAST_REPORTS:
        return None
    early = statistics.median(norms[: len(norms) // 4])
    late = statistics.median(norms[-len(norms) // 4 :])
    if not (early > 0 and late < VANISHING * early):
        return None
    seen = f"the norm fell from {early:.2g} to {late:.2g}"
    if run.option("normalization", "RMSNorm") != "RMSNorm":
        why = "with pre-norm residuals it keeps gradients of deep stacks"
        flag = "--normalization RMSNorm"
        return Diagnosis("vanishing gradients", seen, flag, why, OF_THE_LOSS)
    why = "smaller initial weights or a lower --lr: softmax or activations are saturated"
    return Diagnosis("vanishing gradients", seen, "--init-method-std", why, OF_THE_LOSS)


def _stagnating(run: RunFacts) -> Diagnosis | None:
    losses = run.series("loss")
    if len(losses) < LEAST_REPORTS:
        return None
    early = statistics.fmean(losses[: len(losses) // 4])
    late = statistics.fmean(losses[-len(losses) // 4 :])
    if late < 0.99 * early:
        return None
    seen = f"{early:.3f} at first, {late:.3f} at last"
    rates = run.series("lr")
    if rates and max(rates) < 1e-5:
        why = f"the highest was {max(rates):.1g}"
        return Diagnosis("loss stays", seen, "--lr", why, OF_THE_LOSS)
    why = "look at the tokens with mcore-data inspect; then three times the rate"
    return Diagnosis("loss stays", seen, "--lr", why, OF_THE_LOSS)


def _skipping(run: RunFacts) -> Diagnosis | None:
    skipped = sum(run.series("skipped_steps"))
    steps = run.reports[-1]["iteration"] if run.reports else 0
    if not steps or skipped < 0.1 * steps:
        return None
    seen = f"{skipped:.0f} of {steps} steps were skipped"
    why = "has float32's range and needs no loss scale"
    gain = (
        f"{100 * skipped / steps:.0f} % of the steps, which changed no weight; as fast a step"
    )
    return Diagnosis("overflows", seen, "--bf16", why, gain)


def _imbalance(run: RunFacts) -> Diagnosis | None:
    values = run.series("expert_imbalance")[-LEAST_REPORTS:]
    if not values or statistics.median(values) < 2.0:
        return None
    busiest = statistics.median(values)
    seen = f"the busiest expert has {busiest:.1f} times the mean"
    gain = _no_prediction(run)
    if run.planned is not None:
        parts = run.planned.step().parts
        waiting = (busiest - 1) * (parts.get("experts", 0.0) + parts.get("ep", 0.0))
        gain = f"at most {100 * waiting / sum(parts.values()):.0f} % tokens/s"
        gain += ", if a rank has the busiest experts alone and all others wait for it"
    coefficient = run.option("moe_aux_loss_coeff", 0.0)
    if coefficient:
        why = f"ten times {coefficient:g}"
        return Diagnosis("experts", seen, "--moe-aux-loss-coeff", why, gain)
    flag = "--moe-router-load-balancing-type aux_loss"
    return Diagnosis("experts", seen, flag, "with --moe-aux-loss-coeff 1e-2", gain)


def _bubble(run: RunFacts) -> Diagnosis | None:
    flag, name = "--num-virtual-stages-per-pipeline-rank", "pipeline bubble"
    if run.planned is not None:
        step = run.planned.step()
        share = step.parts.get("bubble", 0.0) / step.total
        if share < LARGE_BUBBLE:
            return None
        seen = f"{100 * share:.0f} % of a step by the planner"
        best = _fastest(run.planned.gains(shorter_bubbles(run.planned.config)))
        if best is None:
            why = "no other schedule is faster and fits: raise --global-batch-size"
            return Diagnosis(name, seen, "", why)
        why = "the schedule with the shortest step, of those that fit"
        return Diagnosis(name, seen, best.flags, why, best.describe())
    stages = run.degree("pipeline")
    sequences = run.option("micro_batch_size", 1) * run.degree("data")
    num = int(run.reports[-1].get("global_batch_size", 0) / sequences) if run.reports else 0
    if stages < 2 or not num:
        return None
    chunks = run.option("num_virtual_stages_per_pipeline_rank", 0) or 1
    share, halved = ((stages - 1) / (n * chunks * num + stages - 1) for n in (1, 2))
    if share < LARGE_BUBBLE:
        return None
    seen = f"{100 * share:.0f} % of a step ({num} micro-batches, {stages} stages)"
    gain = f"{100 * ((1 - halved) / (1 - share) - 1):.0f} % tokens/s by the bubble's formula"
    why = "two chunks a stage, or twice the --global-batch-size"
    return Diagnosis(name, seen, flag, why, gain)


def _fastest(gains: Sequence[Gain]) -> Gain | None:
    """Return the first gain that fits the GPU and exceeds ``LEAST_GAIN``."""
    return next((gain for gain in gains if gain.fits and gain.faster > LEAST_GAIN), None)


def _no_prediction(run: RunFacts) -> str:
    return f"not predicted: {run.unplanned or 'the run is not known to the planner'}"


def _slower_than_planned(run: RunFacts) -> Diagnosis | None:
    """Compare measured step times with the prediction for the same options."""
    times = run.series("step_ms")[1:]
    if run.planned is None or len(times) < LEAST_REPORTS:
        return None
    measured, predicted = statistics.median(times), 1e3 * run.planned.step().total
    if measured < SLOWER * predicted:
        return None
    seen = f"{measured:.0f} ms, and the planner predicts {predicted:.0f}"
    why = "compare the hosts with mcore-train doctor, then look at the data loader's waits"
    gain = f"{100 * (measured / predicted - 1):.0f} % tokens/s, if the cluster is the reason"
    return Diagnosis("slower than planned", seen, "", why, gain)


def _slow(run: RunFacts) -> Diagnosis | None:
    rates = run.series("mfu")[1:]
    if not rates or statistics.median(rates) == 0 or statistics.median(rates) >= GOOD_MFU:
        return None
    seen = f"MFU {100 * statistics.median(rates):.0f} %"
    if run.planned is not None:
        if best := _fastest(run.planned.gains(faster_changes(run.planned.config))):
            why = "the fastest single change that fits and keeps the numbers"
            return Diagnosis("low efficiency", seen, best.flags, why, best.describe())
        why = "no single option is faster: mcore-train plan searches whole layouts"
        return Diagnosis("low efficiency", seen, "", why)
    data = run.degree("data")
    if run.degree("tensor") > 8:
        flag, why = "--tensor-model-parallel-size 8", "more tensor ranks cross hosts"
    elif data > 1 and not run.option("overlap_grad_reduce", False):
        flag, why = "--overlap-grad-reduce", "sums gradients during backward"
    elif run.option("recompute_granularity", "") == "full" and not _memory(run):
        flag, why = "--recompute-granularity selective", "saves most of a third of the step"
    else:
        size = 2 * run.option("micro_batch_size", 1)
        flag, why = f"--micro-batch-size {size}", "GEMMs get larger, if memory has room"
    return Diagnosis("low efficiency", seen, flag, why, _no_prediction(run))


RULES: tuple[Rule, ...] = (
    _ended,
    _memory,
    _not_finite,
    _jumping,
    _stagnating,
    _vanishing,
    _skipping,
    _imbalance,
    _bubble,
    _slower_than_planned,
    _slow,
)
"""Rules in the order of the page: failures first, low speed last."""


def diagnose(run: RunFacts) -> list[Diagnosis]:
    """Apply every rule; return the problems of a run."""
    return [diagnosis for rule in RULES if (diagnosis := rule(run)) is not None]


def run_page(folder: Path, run: RunFacts, diagnoses: Sequence[Diagnosis]) -> str:
    """Format diagnoses as text."""
    steps = run.reports[-1]["iteration"] if run.reports else 0
    lines = [f"{folder}: {steps} steps, {len(run.reports)} reports"]
    if run.planned is not None:
        step = run.planned.step()
        shares = sorted(step.parts.items(), key=lambda part: -part[1])
        text = ", ".join(f"{name} {seconds / step.total:.0%}" for name, seconds in shares[:8])
        lines.append(f"a step by the planner, {step.total:.3g} s: {text}")
    for problem in diagnoses:
        lines.append(f"{problem.name}: {problem.seen}")
        lines.append(
            f"  try {problem.flag}: {problem.why}" if problem.flag else f"  {problem.why}"
        )
        if problem.gain:
            lines.append(f"  gain: {problem.gain}")
    if not diagnoses:
        lines.append("memory, loss, gradients and efficiency are as expected")
    return "\n".join(lines)


def run_json(diagnoses: Sequence[Diagnosis]) -> str:
    """Return diagnoses as a JSON list."""
    return json.dumps([asdict(diagnosis) for diagnosis in diagnoses])
