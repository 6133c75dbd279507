"""Compares the values of golden runs with recorded values, and records new values.

A metric is compared in one of three classes:

- exact: values are equal to the last bit, also between repetitions, on a machine with the
  recorded key (torch, device and dtype). For CPUs and deterministic GPU runs.
- approximate: each value is within a relative tolerance of the recorded value.
- statistical: the mean of the repetitions exceeds the recorded mean by at most a tenth and four
  standard errors of both. For times, where only an increase is a fault.

On a machine with another key, losses are compared in the class approximate with recorded values
of the same dtype, since other GEMM kernels sum in another order; no other metric is compared.
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
"""Relative tolerance of approximate losses. Another vector unit changed the losses of 100 steps
by 3e-7 in float32 and by 3e-4 in bfloat16; losses in float32 and bfloat16 differ by 1.5e-3
(docs/golden-runs.md)."""
FP8_RTOL = 1e-2
FLOOR = 1e-6
"""Absolute tolerance, for values near zero."""
STANDARD_ERRORS = 4.0
SLOWER = 0.1
"""Relative increase of a mean that is allowed in addition to the standard errors."""

Values = Mapping[str, Mapping[str, Any]]
"""Values by metric and step."""


@dataclass(slots=True)
class Comparison:
    """Result of the comparison of one case."""

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    drift: dict[str, float] = field(default_factory=dict)
    """Largest relative difference by metric."""


def read_golden(path: Path) -> dict[str, Any]:
    """Read recorded values by key; empty if the file does not exist."""
    return json.loads(path.read_text()) if path.is_file() else {}


def compare(case: Case, lane: str, results: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare the repetitions of a case with its recorded values of a lane.

    Args:
        case: classes of the metrics, and the file of recorded values.
        lane: lane of the recorded values.
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
        same_dtype = [other for other in golden if other.rpartition(", ")[2] == dtype]
        if not same_dtype:
            comparison.faults.append(
                f"no values are recorded for {key}: record them by mcore-train golden update"
            )
            return comparison
        comparison.notes.append(f"no values for {key}; compared with {same_dtype[-1]}")
        classes = {name: "approximate" for name in classes if name == "loss"}
        key = same_dtype[-1]
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
    # The comparison is false for NaN, so NaN is a fault.
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
        case: the file, and the metrics to record.
        lane: lane of the file.
        results: key and values of each repetition.
        reason: why the values changed, recorded with them.
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
    """Yield JSON text with one line for each metric, so that a diff shows changed metrics."""
    yield "{"
    for place, (key, entry) in enumerate(golden.items()):
        yield f"{',' * (place > 0)}\n {json.dumps(key)}: {{\n"
        yield f'  "reason": {json.dumps(entry["reason"])},\n  "values": {{'
        for index, (metric, values) in enumerate(entry["values"].items()):
            yield f"{',' * (index > 0)}\n   {json.dumps(metric)}: {json.dumps(values)}"
        yield "\n  }\n }"
    yield "\n}\n"
