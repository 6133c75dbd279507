"""``Logger``: what takes the numbers of a run; a program may hand in its own.

Only the rank that reports has loggers. What a logger raises is logged, and training goes on. A
logger that may block is wrapped in ``background.BackgroundLogger``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What identifies a run, and this attempt at it."""

    run_id: str
    """Equal over all attempts that write to one ``metrics.jsonl``."""
    number: int
    """1 for the first attempt."""
    continues_from: int
    """Steps done before."""
    reported: int = 0
    """Last step that earlier attempts have reported, whether or not this one repeats it."""
    folder: Path | None = None
    """The run folder; None where the run has none on a file system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Description of a run: lines of text, and the same as a row of ``metrics.jsonl``."""

    lines: tuple[str, ...]
    row: Mapping[str, Any]


class Logger(Protocol):
    """Takes numbers and texts of one run, in the order in which they come."""

    takes_back: bool
    """Whether the logger itself hides what earlier attempts sent of steps after
    ``continues_from``. Otherwise it is not given points of steps up to ``reported`` again."""

    def begin(self, attempt: Attempt) -> None:
        """Open the run, or open it again."""

    def describe(self, header: Header) -> None:
        """Take the description of the run."""

    def log(self, kind: str, iteration: int, numbers: Mapping[str, float | int]) -> None:
        """Take numbers of a step; ``kind`` is that of ``metrics.jsonl``, such as train."""

    def close(self) -> None:
        """Send what is left."""
