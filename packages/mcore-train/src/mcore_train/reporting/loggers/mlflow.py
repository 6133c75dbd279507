"""Logs to MLflow, configured by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

import os
import time
from collections.abc import Mapping

from mcore_train.reporting.loggers.protocol import Attempt, Header

_TAG = "mcore.run_id"


class MlflowLogger:
    """Logs to one MLflow run, which later attempts find by a tag with the run's id."""

    takes_back = False

    def __init__(self) -> None:
        """Import the MLflow client.

        Raises:
            ModuleNotFoundError: if the package is not installed.
        """
        from mlflow import MlflowClient  # pyrefly: ignore
        from mlflow.entities import Metric  # pyrefly: ignore

        self._make_client, self._metric = MlflowClient, Metric

    def begin(self, attempt: Attempt) -> None:
        """Open the run; a later attempt opens the same run again."""
        self._client = self._make_client()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mcore")
        experiment = self._client.get_experiment_by_name(name)
        number = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        runs = self._client.search_runs([number], f"tags.`{_TAG}` = '{attempt.run_id}'")
        run = runs[0] if runs else self._client.create_run(number, tags={_TAG: attempt.run_id})
        self._id = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")

    def describe(self, header: Header) -> None:
        """Store the description of the run."""
        self._client.set_tag(self._id, "mlflow.note.content", "\n".join(header.lines))

    def log(self, kind: str, iteration: int, numbers: Mapping[str, float | int]) -> None:
        """Send numbers of a step."""
        now_ms = int(1e3 * time.time())
        rows = [
            self._metric(f"{kind}/{name}", value, now_ms, iteration)
            for name, value in numbers.items()
        ]
        self._client.log_batch(self._id, metrics=rows)

    def close(self) -> None:
        """Send all queued numbers and close the run."""
        self._client.set_terminated(self._id)
