"""Compares the values of golden runs with the recorded ones, and records new ones.

A metric is compared in one of three classes:

- exact: every bit, on a machine with the recorded key (torch, device and dtype). All
  repetitions must agree as well. CPUs and deterministic GPU runs keep it.
- approximate: each value within a relative tolerance of the recorded one.
- statistical: the mean of the repetitions is not above the recorded mean by more than four
  standard errors of both and a tenth. For times, which only matter when they grow.

On another key than the recorded ones, losses are compared with those of the same dtype in the
class approximate, and nothing else is: other GEMM kernels sum in another order.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_train.golden.cases import Case

RTOL = {"grad_norm": 0.05, "peak_gib": 0.05}
LOSS_RTOL = {"float32": 1e-4, "bfloat16": 5e-3, "float16": 5e-3}
"""Of approximate losses. Another vector unit moved those of 100 steps by 3e-7 in float32 and by
3e-4 in bfloat16; float32 itself and bfloat16 are 1.5e-3 apart (docs/golden-runs.md)."""
FP8_RTOL = 1e-2
FLOOR = 1e-6
"""Differences of values near zero that are never faults."""
STANDARD_ERRORS = 4.0
SLOWER = 0.1
"""Share by which a mean may grow whatever its scatter."""

Values = Mapping[str, Mapping[str, Any]]
"""By metric and step."""


@dataclass(slots=True)
class Comparison:
    """Result of the comparison of one case."""

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    drift: dict[str, float] = field(default_factory=dict)
    """Largest relative difference by metric."""


def read_golden(path: Path) -> dict[str, Any]:
    """Read recorded values by key; none if there is no file."""
    return json.loads(path.read_text()) if path.is_file() else {}


def compare(case: Case, lane: str, results: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare the repetitions of a case with its recorded values of a lane.

    Args:
        case: gives the metrics' classes and the file.
        lane: whose values to take.
        results: key and values of each repetition, at least one.
    """
    golden, key = read_golden(case.golden_file(lane)), results[0]["key"]
    comparison = Comparison()
    runs = [result["values"] for result in results]
    for metric, kind in case.metrics.items():
        if kind == "exact" and any(run[metric] != runs[0][metric] for run in runs[1:]):
            comparison.faults.append(f"{metric} differs between repetitions")
    classes = dict(case.metrics)
    if key not in golden:
        dtype = key.rpartition(", ")[2]
        like = [other for other in golden if other.rpartition(", ")[2] == dtype]
        if not like:
            comparison.faults.append(
                f"no values are recorded for {key}: mcore-train golden update records them"
            )
            return comparison
        comparison.notes.append(f"no values for {key}; compared with {like[-1]}")
        classes = {name: "approximate" for name in classes if name == "loss"}
        key = like[-1]
    rtol = RTOL | {"loss": LOSS_RTOL.get(key.rpartition(", ")[2], FP8_RTOL)}
    for metric, kind in classes.items():
        expected = golden[key]["values"].get(metric, {})
        _compare_metric(metric, kind, runs, expected, rtol.get(metric, 0.0), comparison)
    return comparison


def _compare_metric(
    metric: str,
    kind: str,
    runs: Sequence[Values],
    expected: Mapping[str, Any],
    rtol: float,
    comparison: Comparison,
) -> None:
    last = max(map(int, runs[0]["loss"]))
    wrong = []
    for step, value in expected.items():
        if int(step) > last:
            continue
        if any(step not in run[metric] for run in runs):
            comparison.faults.append(f"{metric} of step {step} is missing")
            continue
        actual = [run[metric][step] for run in runs]
        fault = _fault(kind, actual, value, rtol)
        _note_drift(comparison, metric, actual, value)
        if fault:
            wrong.append(f"{metric} of step {step}: {fault}")
    comparison.faults += wrong[:1]
    if wrong[1:]:
        comparison.faults.append(f"{metric} of {len(wrong) - 1} later steps as well")


def _fault(kind: str, actual: Sequence[Any], value: Any, rtol: float) -> str:
    if kind == "exact" or value is None or None in actual:  # a skipped step has no norm
        return "" if actual[0] == value else f"{actual[0]} where {value} is recorded"
    if kind == "statistical":
        mean, known = statistics.fmean(actual), statistics.fmean(value)
        spread = math.sqrt(_variance(actual) / len(actual) + _variance(value) / len(value))
        limit = known * (1 + SLOWER) + STANDARD_ERRORS * spread
        return f"mean {mean:.6g} is above {limit:.6g}" if not mean <= limit else ""
    worst = max(actual, key=lambda number: abs(number - value))
    # Written so that a NaN is a fault.
    if all(abs(number - value) <= rtol * abs(value) + FLOOR for number in actual):
        return ""
    return f"{worst:.8g} is further than {rtol:g} from {value:.8g}"


def _variance(values: Sequence[float]) -> float:
    return statistics.variance(values) if len(values) > 1 else 0.0


def _note_drift(comparison: Comparison, metric: str, actual: Sequence[Any], value: Any) -> None:
    if isinstance(value, str) or value is None or None in actual:
        drift = float(actual[0] != value)
    else:
        known = statistics.fmean(value) if isinstance(value, list) else value
        drift = abs(statistics.fmean(actual) - known) / max(abs(known), FLOOR)
    comparison.drift[metric] = max(drift, comparison.drift.get(metric, 0.0))


def record(case: Case, lane: str, results: Sequence[Mapping[str, Any]], reason: str) -> None:
    """Write the values of a case's repetitions into its golden file, under their key.

    Args:
        case: gives the file and the metrics to keep.
        lane: whose file to write.
        results: key and values of each repetition.
        reason: why the values are new; kept beside them.
    """
    path = case.golden_file(lane)
    golden = read_golden(path)
    values = {}
    for metric, kind in case.metrics.items():
        runs = [result["values"][metric] for result in results]
        values[metric] = (
            {step: [run[step] for run in runs] for step in runs[0]}
            if kind == "statistical"
            else runs[0]
        )
    golden[results[0]["key"]] = {"reason": reason, "values": values}
    path.write_text("".join(_lines(golden)))


def _lines(golden: Mapping[str, Any]) -> Iterator[str]:
    """Write JSON with one line a metric, so that a diff shows what moved."""
    yield "{"
    for place, (key, entry) in enumerate(golden.items()):
        yield f"{',' * (place > 0)}\n {json.dumps(key)}: {{\n"
        yield f'  "reason": {json.dumps(entry["reason"])},\n  "values": {{'
        for index, (metric, values) in enumerate(entry["values"].items()):
            yield f"{',' * (index > 0)}\n   {json.dumps(metric)}: {json.dumps(values)}"
        yield "\n  }\n }"
    yield "\n}\n"
