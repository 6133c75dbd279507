"""``mcore-models count`` against the peaks that training had on GPUs."""

import json
from pathlib import Path

from mcore_models.counting import build_report, parse_count

ROOT = Path(__file__).parents[2]


HELD = "llama-3-8b-8-layers-h200-x1-fp8-gated-delayed"
"""Its build held what lies between fp8 linears until the collector ran: 8 GiB."""


def measured():
    """Read the results that kept their command line and their peak."""
    for file in sorted((ROOT / "benchmarks" / "results").glob("*-h200-*.json")):
        result = json.loads(file.read_text())
        is_step = (
            isinstance(result, dict) and {"flags", "peak_gib", "num_gpus"} <= result.keys()
        )
        if is_step and result["name"] != HELD:
            yield result


def test_estimates_are_close_below_the_peaks_that_were_measured(monkeypatch):
    monkeypatch.chdir(ROOT)  # recipes are named from here
    results = list(measured())
    assert len(results) > 20
    for result in results:
        words = [*result["flags"].split(), "--nproc", str(result["num_gpus"])]
        config, _ = parse_count(words)
        ratio = build_report(config)["rank_total_gib"] / result["peak_gib"]
        assert 0.94 < ratio < 1.01, (result["name"], ratio)
