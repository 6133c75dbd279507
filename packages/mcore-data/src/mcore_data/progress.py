"""Progress of a long job for people: a bar on a terminal, lines in a log."""

import logging
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as RichProgress,
)

from mcore_data.preprocessing import Progress

log = logging.getLogger(__name__)

_LINE_EVERY_S = 10.0


class Bar:
    """A bar with the rate and the time left, on standard error."""

    def __init__(self, title: str) -> None:
        self._rich = RichProgress(
            TextColumn(title),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._rich.add_task(title, total=None, rate="")

    def __enter__(self) -> "Bar":
        """Show the bar."""
        self._rich.start()
        return self

    def __call__(self, progress: Progress) -> None:
        """Show how far the job is."""
        self._rich.update(
            self._task,
            total=progress.total_bytes or None,
            completed=progress.done_bytes,
            rate=describe_rate(progress),
        )

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bar as it is."""
        self._rich.stop()


class Lines:
    """A line every ten seconds, with the rate and the time left."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._last_s = 0.0

    def __enter__(self) -> "Lines":
        """Return itself."""
        return self

    def __call__(self, progress: Progress) -> None:
        """Log how far the job is, if the last line is old enough."""
        if progress.elapsed_s - self._last_s < _LINE_EVERY_S:
            return
        self._last_s = progress.elapsed_s
        log.info("%s: %s%s", self._title, describe_rate(progress), describe_left(progress))

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to put away."""


def describe_rate(progress: Progress) -> str:
    """Documents, tokens and speed in a few words."""
    rate = progress.num_tokens / max(progress.elapsed_s, 1e-9)
    return (
        f"{progress.num_documents:,} documents, {progress.num_tokens:,} tokens, "
        f"{rate / 1e6:.2f} M tokens/s"
    )


def describe_left(progress: Progress) -> str:
    """Return the share done and seconds left, where the whole is known."""
    if not progress.total_bytes or not progress.done_bytes:
        return ""
    share = progress.done_bytes / progress.total_bytes
    left_s = progress.elapsed_s * (1 - share) / share
    return f", {100 * share:.0f} %, {left_s:.0f} s left"
