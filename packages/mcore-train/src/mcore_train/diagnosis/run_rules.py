"""``mcore-train doctor RUN``: reads the numbers of a run, names the flag most likely to help.

``RULES`` are the usual diagnosis tables of large-model training: memory, a loss that jumps or
stays, low efficiency, vanishing gradients, experts out of balance. Each rule reads the rows of
``metrics.jsonl`` that later attempts kept, and the newest ``recipe.toml`` below the run.
"""

import json
import math
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from mcore_train.diagnosis.memory_mends import MemoryRecord, cheapest_mend
from mcore_train.diagnosis.triage import triage
from mcore_train.reporting.log import METRICS, read_metrics

LEAST_REPORTS = 8
"""Reports that a rule on a trend needs."""
GOOD_MFU = 0.4
"""Share of the peak below which a dense run on more than one host is worth a look."""
JUMP = 0.2
"""Rise of the loss, as a share, that counts as a jump."""
NOISE = 0.05
"""Standard deviation of the loss about its trend, as a share, that counts as oscillation."""
VANISHING = 1e-3
"""Share of the first gradient norms that counts as vanished."""
FULL_SHARE = 0.92
"""Share of a GPU's memory above which a run is near its limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What a run folder holds."""

    reports: Sequence[Mapping[str, Any]] = ()
    """Rows of kind ``train``, in order."""
    header: Mapping[str, Any] = field(default_factory=dict)
    """Row of kind ``run``: layout, devices, format."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the newest recipe.toml."""
    fault: str = ""
    """Class that triage gives the logs of the run, where there are any."""
    advice: str = ""
    """Of triage."""

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
    """One thing that is not as it should be."""

    name: str
    seen: str
    """The numbers that show it."""
    flag: str
    """Option most likely to help."""
    why: str
    """What the option changes, and by how much where that is known."""


Rule = Callable[[RunFacts], Diagnosis | None]


def read_run(folder: Path) -> RunFacts:
    """Read metrics, recipe and logs of a run folder.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if it holds neither metrics nor logs.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist: give the --save folder of a run.")
    rows = read_metrics(folder / METRICS)
    recipes = sorted(folder.rglob("recipe.toml"))
    options: dict[str, Any] = {}
    if recipes:
        options = _leaves(tomllib.loads(recipes[-1].read_text()))
    fault = advice = ""
    logs = [p for p in folder.rglob("*") if p.suffix in (".log", ".err", ".out")]
    if logs:
        verdict = triage(folder)
        fault, advice = verdict.fault, verdict.advice
    if not rows and not logs:
        raise ValueError(
            f"{folder} holds no {METRICS} and no logs: give the --save folder of a run."
        )
    headers = [row for row in rows if row["kind"] == "run"]
    return RunFacts(
        reports=[row for row in rows if row["kind"] == "train"],
        header=headers[-1] if headers else {},
        options=options,
        fault=fault,
        advice=advice,
    )


def _leaves(table: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _leaves(value) if isinstance(value, dict) else {name: value}
    return found


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
    record = MemoryRecord(
        layout=dict(run.header.get("layout", {})),
        sharding=_sharding(run),
        recompute=run.option("recompute_granularity", ""),
        micro_batch_size=run.option("micro_batch_size", 1),
    )
    flag, _, why = (run.advice if is_out and run.advice else cheapest_mend(record)).partition(
        ":"
    )
    seen = "out of memory" if is_out else f"{peak:.1f} of {capacity:.0f} GiB in use"
    return Diagnosis("memory", seen, flag, why.strip())


def _sharding(run: RunFacts) -> str:
    strategy = run.option("data_parallel_sharding_strategy", "no_shard")
    return "optim" if run.option("use_distributed_optimizer", False) else strategy


def _capacity_gib(run: RunFacts) -> float:
    sizes = {"H200": 139.8, "H100": 79.2, "A100": 79.2, "B200": 178.4}
    names = " ".join(run.header.get("devices", {})).replace("-", " ").split()
    return next((sizes[name] for name in names if name in sizes), 0.0)


def _not_finite(run: RunFacts) -> Diagnosis | None:
    bad = [row["iteration"] for row in run.reports if row.get("loss", 0.0) is None]
    if not bad:
        return None
    return Diagnosis(
        "loss not finite",
        f"at step {bad[0]}",
        "--lr",
        "half of it, from the checkpoint before; --clip-grad 1.0 if it is off",
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
        return Diagnosis("oscillating loss", seen, "--lr-warmup-iters", why)
    if not run.option("clip_grad", 1.0):
        return Diagnosis("oscillating loss", seen, "--clip-grad 1.0", "the norm is not limited")
    lr = run.option("lr", 0.0)
    return Diagnosis("oscillating loss", seen, f"--lr {lr / 2:g}", f"half of {lr:g}")


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
        return Diagnosis("vanishing gradients", seen, "--normalization RMSNorm", why)
    why = "smaller initial weights or a lower --lr: softmax or activations are saturated"
    return Diagnosis("vanishing gradients", seen, "--init-method-std", why)


def _staying(run: RunFacts) -> Diagnosis | None:
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
        return Diagnosis("loss stays", seen, "--lr", f"the highest was {max(rates):.1g}")
    why = "look at the tokens with mcore-data inspect; then three times the rate"
    return Diagnosis("loss stays", seen, "--lr", why)


def _skipping(run: RunFacts) -> Diagnosis | None:
    skipped = sum(run.series("skipped_steps"))
    steps = run.reports[-1]["iteration"] if run.reports else 0
    if not steps or skipped < 0.1 * steps:
        return None
    seen = f"{skipped:.0f} of {steps} steps were skipped"
    return Diagnosis("overflows", seen, "--bf16", "has float32's range and needs no loss scale")


def _imbalance(run: RunFacts) -> Diagnosis | None:
    values = run.series("expert_imbalance")[-LEAST_REPORTS:]
    if not values or statistics.median(values) < 2.0:
        return None
    seen = f"the busiest expert has {statistics.median(values):.1f} times the mean"
    name = "--moe-router-load-balancing-type aux_loss"
    coefficient = run.option("moe_aux_loss_coeff", 0.0)
    if coefficient:
        return Diagnosis("experts", seen, "--moe-aux-loss-coeff", f"ten times {coefficient:g}")
    return Diagnosis("experts", seen, name, "with --moe-aux-loss-coeff 1e-2")


def _bubble(run: RunFacts) -> Diagnosis | None:
    stages = run.degree("pipeline")
    sequences = run.option("micro_batch_size", 1) * run.degree("data")
    num = int(run.reports[-1].get("global_batch_size", 0) / sequences) if run.reports else 0
    if stages < 2 or not num:
        return None
    chunks = run.option("num_virtual_stages_per_pipeline_rank", 0) or 1
    share = (stages - 1) / (chunks * num + stages - 1)
    if share < 0.1:
        return None
    seen = f"{100 * share:.0f} % of a step is bubble ({num} micro-batches, {stages} stages)"
    better = (stages - 1) / (2 * chunks * num + stages - 1)
    gain = 100 * ((1 - better) / (1 - share) - 1)
    why = f"two chunks a stage, or twice the --global-batch-size: {gain:.0f} % faster"
    return Diagnosis("pipeline bubble", seen, "--num-virtual-stages-per-pipeline-rank", why)


def _slow(run: RunFacts) -> Diagnosis | None:
    rates = run.series("mfu")[1:]
    if not rates or statistics.median(rates) == 0 or statistics.median(rates) >= GOOD_MFU:
        return None
    seen = f"MFU {100 * statistics.median(rates):.0f} %"
    is_full = bool(_memory(run))
    data = run.degree("data")
    if run.degree("tensor") > 8:
        flag, why = "--tensor-model-parallel-size 8", "more tensor ranks cross hosts"
    elif data > 1 and not run.option("overlap_grad_reduce", False):
        flag, why = "--overlap-grad-reduce", "sums gradients during backward"
    elif data > 1 and _sharding(run) != "no_shard" and not run.option("overlap_param_gather"):
        flag, why = "--overlap-param-gather", "gathers weights during forward"
    elif run.degree("tensor") > 1 and not run.option("sequence_parallel", False):
        flag, why = "--sequence-parallel", "shares norms and dropout over tensor ranks"
    elif not is_full:
        size = 2 * run.option("micro_batch_size", 1)
        flag, why = f"--micro-batch-size {size}", "memory has room, and GEMMs get larger"
    elif run.option("recompute_granularity", "") == "full":
        flag, why = "--recompute-granularity selective", "saves most of a third of the step"
    else:
        flag, why = "--fp8-format hybrid", "doubles the rate of GEMMs on Hopper and later"
    return Diagnosis("low efficiency", seen, flag, why)


RULES: tuple[Rule, ...] = (
    _ended,
    _memory,
    _not_finite,
    _jumping,
    _staying,
    _vanishing,
    _skipping,
    _imbalance,
    _bubble,
    _slow,
)
"""In the order of the page: what ends a run first, what makes it slow last."""


def diagnose(run: RunFacts) -> list[Diagnosis]:
    """Apply every rule; return what is not as it should be."""
    return [found for rule in RULES if (found := rule(run)) is not None]


def run_page(folder: Path, run: RunFacts, found: Sequence[Diagnosis]) -> str:
    """Write the diagnoses for a person."""
    steps = run.reports[-1]["iteration"] if run.reports else 0
    lines = [f"{folder}: {steps} steps, {len(run.reports)} reports"]
    for one in found:
        lines.append(f"{one.name}: {one.seen}")
        lines.append(f"  try {one.flag}: {one.why}" if one.flag else f"  {one.why}")
    if not found:
        lines.append("memory, loss, gradients and efficiency are as expected")
    return "\n".join(lines)


def run_json(found: Sequence[Diagnosis]) -> str:
    """Write the diagnoses for programs."""
    return json.dumps([asdict(one) for one in found])
