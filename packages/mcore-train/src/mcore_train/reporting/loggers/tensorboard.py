"""Writes event files for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from mcore_train.reporting.loggers.protocol import Attempt, Header


class TensorBoardLogger:
    """Writes event files; TensorBoard hides abandoned steps of earlier attempts."""

    takes_back = True

    def __init__(self, folder: Path, queue_size: int = 10) -> None:
        """Import TensorBoard; ``begin`` opens the files.

        Raises:
            ModuleNotFoundError: if the package is not installed.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._open, self._queue_size = folder, SummaryWriter, queue_size

    def begin(self, attempt: Attempt) -> None:
        """Open the run; a later attempt opens the same run again."""
        step = attempt.continues_from + 1
        self._board = self._open(str(self._folder), purge_step=step, max_queue=self._queue_size)

    def describe(self, header: Header) -> None:
        """Store the description of the run."""
        self._board.add_text("run", "  \n".join(header.lines))

    def log(self, kind: str, iteration: int, numbers: Mapping[str, float | int]) -> None:
        """Send numbers of a step."""
        for name, value in numbers.items():
            self._board.add_scalar(f"{kind}/{name}", value, iteration)

    def close(self) -> None:
        """Send all queued numbers and close the run."""
        self._board.close()
