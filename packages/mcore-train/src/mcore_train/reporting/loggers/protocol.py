"""The protocol of loggers, which receive the numbers of a run; programs may pass their own.

Only the rank that reports has loggers. An error of a logger is logged, and training goes on. A
logger that may block is wrapped in ``background.BackgroundLogger``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Identity of a run and of this attempt to execute it."""

    run_id: str
    """Identity of the run, equal in all attempts that write to one ``metrics.jsonl``."""
    number: int
    """1 for the first attempt."""
    continues_from: int
    """Number of steps done before this attempt."""
    reported: int = 0
    """Last step that earlier attempts have reported, even if this attempt repeats the step."""
    folder: Path | None = None
    """The run folder; None if it is not on a file system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Description of a run, as lines of text and as a row of ``metrics.jsonl``."""

    lines: tuple[str, ...]
    row: Mapping[str, Any]


class Logger(Protocol):
    """Receives numbers and texts of one run, in the order of the run."""

    takes_back: bool
    """Whether the logger hides points that earlier attempts sent for steps after
    ``continues_from``. Otherwise it does not get points of steps up to ``reported`` again."""

    def begin(self, attempt: Attempt) -> None:
        """Open the run; a later attempt opens the same run again."""

    def describe(self, header: Header) -> None:
        """Store the description of the run."""

    def log(self, kind: str, iteration: int, numbers: Mapping[str, float | int]) -> None:
        """Send numbers of a step; ``kind`` is that of ``metrics.jsonl``, such as train."""

    def close(self) -> None:
        """Send all queued numbers and close the run."""
