"""Logs to trackio, which stores numbers in a folder of this host (TRACKIO_DIR)."""

import os
from collections.abc import Mapping

from mcore_train.reporting.loggers.protocol import Attempt, Header


class TrackioLogger:
    """Logs to one trackio run, which later attempts continue."""

    takes_back = False

    def __init__(self) -> None:
        """Import trackio.

        Raises:
            ModuleNotFoundError: if the package is not installed.
        """
        import trackio  # pyrefly: ignore

        self._trackio = trackio

    def begin(self, attempt: Attempt) -> None:
        """Open the run; a later attempt opens the same run again."""
        project = os.environ.get("TRACKIO_PROJECT", "mcore")
        self._run = self._trackio.init(project=project, name=attempt.run_id, resume="allow")

    def describe(self, header: Header) -> None:
        """Store the description of the run."""
        self._run.config.update(dict(header.row))

    def log(self, kind: str, iteration: int, numbers: Mapping[str, float | int]) -> None:
        """Send numbers of a step."""
        row = {f"{kind}/{name}": value for name, value in numbers.items()}
        self._run.log(row, step=iteration)

    def close(self) -> None:
        """Send all queued numbers and close the run."""
        self._run.finish()
