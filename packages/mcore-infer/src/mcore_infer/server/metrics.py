"""Counters and histograms, and their text for Prometheus (exposition format 0.0.4)."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Histogram:
    """Counts of durations by upper bound, in seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS_S) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> list[str]:
        """Return the samples."""
        found, seen = [], 0
        for bound, count in zip([*_BOUNDS_S, "+Inf"], self.counts, strict=True):
            seen += count
            found.append(f'{name}_bucket{{le="{bound}"}} {seen}')
        return [*found, f"{name}_sum {self.total:.6f}", f"{name}_count {seen}"]


class Metrics:
    """Counters and histograms of a server; used by one event loop.

    Attributes:
        responses: by path and status.
        prompt_tokens: of all requests that ended.
        written_tokens: of all texts.
        first_token: from the arrival of a request to its first tokens.
        between_tokens: from tokens to the next ones of a text.
        cancelled: requests whose client disconnected.
    """

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = self.written_tokens = self.cancelled = 0
        self.first_token, self.between_tokens = Histogram(), Histogram()

    def text(self, gauges: Mapping[str, tuple[str, float | int]]) -> str:
        """Return all in Prometheus' text format.

        Args:
            gauges: help text and current value, by name.
        """
        lines = _head("responses_total", "Responses by path and status.", "counter")
        for (path, status), count in sorted(self.responses.items()):
            lines.append(f'mcore_responses_total{{path="{path}",status="{status}"}} {count}')
        for name, about, value in (
            ("prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("written_tokens_total", "Tokens of texts.", self.written_tokens),
            ("cancelled_total", "Requests whose client left.", self.cancelled),
        ):
            lines += [*_head(name, about, "counter"), f"mcore_{name} {value}"]
        for name, about, histogram in (
            ("first_token_seconds", "Arrival to first tokens.", self.first_token),
            ("between_tokens_seconds", "Tokens to the next of a text.", self.between_tokens),
        ):
            lines += [*_head(name, about, "histogram"), *histogram.lines(f"mcore_{name}")]
        for name, (about, value) in gauges.items():
            lines += [*_head(name, about, "gauge"), f"mcore_{name} {value}"]
        return "\n".join(lines) + "\n"


def _head(name: str, about: str, kind: str) -> list[str]:
    return [f"# HELP mcore_{name} {about}", f"# TYPE mcore_{name} {kind}"]
