"""Writes numbers for Prometheus to ``metrics.prom`` in the run folder.

The node exporter's textfile collector reads such files, so that a job behind a firewall needs
no port. With ``--health-port`` Prometheus can scrape the job directly, without a package.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_train.reporting.loggers.protocol import Attempt, Header

FILE = "metrics.prom"


class PrometheusLogger:
    """Writes the newest value of each number to a file, as gauges labelled with the run."""

    takes_back = True

    def __init__(self, folder: Path) -> None:
        """Import the Prometheus client.

        Raises:
            ModuleNotFoundError: if the package is not installed.
        """
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile  # pyrefly: ignore

        self._file, self._write, self._gauge = folder / FILE, write_to_textfile, Gauge
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}

    def begin(self, attempt: Attempt) -> None:
        """Open the run; a later attempt opens the same run again."""
        self._run = attempt.run_id
        self._file.parent.mkdir(parents=True, exist_ok=True)

    def describe(self, header: Header) -> None:
        """Store the description of the run."""

    def log(self, kind: str, iteration: int, numbers: Mapping[str, float | int]) -> None:
        """Send numbers of a step."""
        for name, value in {"iteration": iteration, **numbers}.items():
            characters = (c if c.isalnum() else "_" for c in f"mcore_{kind}_{name}")
            metric = "".join(characters)
            if metric not in self._gauges:
                self._gauges[metric] = self._gauge(
                    metric, name, ["run"], registry=self._registry
                )
            self._gauges[metric].labels(self._run).set(value)
        self._write(str(self._file), self._registry)

    def close(self) -> None:
        """Send all queued numbers and close the run."""
