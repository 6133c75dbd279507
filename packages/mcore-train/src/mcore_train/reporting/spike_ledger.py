"""``mcore-train explain``: the steps that a run left out or rewound, and their documents.

Reads ``spikes.jsonl`` of the run folder, and finds the documents of a step by the data plan of
the newest checkpoint.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_data.tracing.data_plan import batch_size_at
from mcore_data.tracing.explaining import RunData, draw_explanation
from mcore_train.reporting.log import SPIKES, read_metrics


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's ledger, the newest of each step."""
    return list({row["iteration"]: row for row in read_metrics(folder / SPIKES)}.values())


def describe_spike(row: Mapping[str, Any]) -> str:
    """Format a row of the ledger as text."""
    ends = {
        "skip": "its update was left out",
        "stop": "its update was left out, and the run ended",
        "rewind": f"weights and optimizer were rewound to step {row.get('rewound_to')}",
        "given": "left out by --iterations-to-skip",
    }
    if row["action"] == "given":
        return ends["given"]
    numbers = [
        f"{words} {_number(row[key])} (before {_number(row[f'{key}_mean'])} +- "
        f"{_number(row[f'{key}_deviation'])})"
        for key, words in (("loss", "loss"), ("grad_norm", "gradient norm"))
    ]
    return f"{', '.join(numbers)}; {ends[row['action']]}"


def ledger_page(folder: Path, step: int = 0, num_samples: int = 4) -> Iterator[str]:
    """Yield the lines of ``mcore-train explain``.

    Args:
        folder: the run folder.
        step: only step to show, which need not be a spike; 0: all steps of the ledger.
        num_samples: number of samples of a step whose texts are shown.

    Raises:
        ValueError: if there is nothing to show.
    """
    rows = {row["iteration"]: row for row in read_ledger(folder)}
    if not rows and not step:
        raise ValueError(
            f"{folder} holds no {SPIKES}: the run has left out no step. Use --step N to show "
            "the documents of any step."
        )
    reason, data = "", None
    try:
        data = RunData(folder)
    except (OSError, ValueError) as error:
        reason = str(error)
    for number in [step] if step else sorted(rows):
        text = "not in the ledger"
        if number in rows:
            try:
                text = describe_spike(rows[number])
            except (KeyError, TypeError, ValueError) as error:
                text = f"its line in {folder / SPIKES} is damaged ({error!r})"
        yield f"step {number} (--iterations-to-skip {number - 1}): {text}"
        if data is None:
            yield f"  the documents are not known: {reason}"
            continue
        size = batch_size_at(data.plan.stretches, number)
        for sample in range(min(num_samples, size)):
            yield from (f"  {line}" for line in draw_explanation(data, number, sample))
        if size > num_samples:
            yield f"  {size - num_samples} more samples: --samples {size}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
