"""Logs to a collector of OpenTelemetry, by OTLP over HTTP.

The standard variables configure it: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_METRIC_EXPORT_INTERVAL.
"""

from collections.abc import Mapping
from typing import Any

from mcore_train.reporting.loggers.protocol import Attempt, Header


class OpenTelemetryLogger:
    """Sets a gauge for each number and for the step, which is never an attribute."""

    takes_back = True

    def __init__(self) -> None:
        """Import SDK and exporter.

        Raises:
            ModuleNotFoundError: if a package is not installed.
        """
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # pyrefly: ignore
        from opentelemetry.sdk.metrics import MeterProvider  # pyrefly: ignore
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # pyrefly: ignore
        from opentelemetry.sdk.resources import Resource  # pyrefly: ignore

        def open_provider(run_id: str) -> MeterProvider:
            resource = Resource.create({"service.name": "mcore-train", "run.id": run_id})
            reader = PeriodicExportingMetricReader(OTLPMetricExporter())
            return MeterProvider([reader], resource=resource)

        self._open = open_provider
        self._gauges: dict[str, Any] = {}

    def begin(self, attempt: Attempt) -> None:
        """Open the run; a later attempt opens the same run again."""
        self._provider = self._open(attempt.run_id)
        self._meter = self._provider.get_meter("mcore_train")

    def describe(self, header: Header) -> None:
        """Store the description of the run."""

    def log(self, kind: str, iteration: int, numbers: Mapping[str, float | int]) -> None:
        """Send numbers of a step."""
        for name, value in {"iteration": iteration, **numbers}.items():
            metric = f"mcore.{kind}.{name}".replace("/", ".").replace(" ", "_")
            if metric not in self._gauges:
                self._gauges[metric] = self._meter.create_gauge(metric)
            self._gauges[metric].set(value)

    def close(self) -> None:
        """Send all queued numbers and close the run."""
        self._provider.shutdown()
