"""Shows the progress of a long job: a bar on a terminal, or lines in a log."""

import logging
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from mcore_data.preprocessing.tokenizing import Progress

log = logging.getLogger(__name__)

_LINE_EVERY_S = 10.0


class Bar:
    """Draws a bar with the rate and the time left on standard error."""

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
        """Redraw the bar."""
        self._rich.update(
            self._task,
            total=progress.total_bytes or None,
            completed=progress.done_bytes,
            rate=describe_rate(progress),
        )

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing; the last state of the bar remains on the terminal."""
        self._rich.stop()


class Lines:
    """Logs lines with the rate and the time left.

    Args:
        title: name of the job.
        every_documents: documents between two lines; 0 logs a line every ten seconds.
    """

    def __init__(self, title: str, every_documents: int = 0) -> None:
        self._title = title
        self._every_documents = every_documents
        self._last = Progress(0, 0, 0, 0, 0.0)

    def __enter__(self) -> "Lines":
        """Return itself."""
        return self

    def __call__(self, progress: Progress) -> None:
        """Log a line if it is due."""
        last = self._last
        if self._every_documents:
            is_due = progress.num_documents - last.num_documents >= self._every_documents
        else:
            is_due = progress.elapsed_s - last.elapsed_s >= _LINE_EVERY_S
        if not is_due:
            return
        self._last = progress
        log.info("%s: %s%s", self._title, describe_rate(progress), describe_left(progress))

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""


def describe_rate(progress: Progress) -> str:
    """Return documents, tokens and tokens per second as text."""
    rate = (progress.num_tokens - progress.began_tokens) / max(progress.elapsed_s, 1e-9)
    return (
        f"{progress.num_documents:,} documents, {progress.num_tokens:,} tokens, "
        f"{rate / 1e6:.2f} M tokens/s"
    )


def describe_left(progress: Progress) -> str:
    """Return the finished share and the seconds left as text; "" if the size is unknown."""
    now_bytes = progress.done_bytes - progress.began_bytes
    if not progress.total_bytes or now_bytes <= 0:
        return ""
    share = progress.done_bytes / progress.total_bytes
    left_s = progress.elapsed_s * (progress.total_bytes - progress.done_bytes) / now_bytes
    return f", {100 * share:.0f} %, {left_s:.0f} s left"
