"""Runs a logger that may block, such as a client that retries a dead server, in a thread."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from queue import Full, Queue
from threading import Thread

from mcore_train.reporting.loggers.protocol import Attempt, Header, Logger

log = logging.getLogger(__name__)


def warn_of_failure(logger: Logger, error: Exception) -> None:
    """Log a warning that a logger raised an error and gets no more numbers."""
    log.warning(
        "%s failed and gets no more numbers of this run (%s: %s); training goes on",
        *(type(logger).__name__, type(error).__name__, error),
    )


class BackgroundLogger:
    """Calls another logger in a daemon thread; all methods but ``close`` return at once.

    At most ``max_waiting`` calls are queued; further calls are dropped. ``close`` waits for at
    most ``close_timeout_s`` and warns of the number of points that were not sent.
    """

    def __init__(
        self, logger: Logger, max_waiting: int = 1000, close_timeout_s: float = 30.0
    ) -> None:
        """Prepare a logger; ``begin`` starts the thread."""
        self.takes_back = logger.takes_back
        self._logger, self._close_timeout_s = logger, close_timeout_s
        self._calls: Queue[Callable[[], None]] = Queue(max_waiting)
        self._thread = Thread(target=self._run, name=type(logger).__name__, daemon=True)
        self._num_points = self._num_arrived = 0
        self._has_dropped = self._has_failed = False

    def begin(self, attempt: Attempt) -> None:
        """Start the thread, and open the run in it."""
        self._thread.start()
        self._send(partial(self._logger.begin, attempt))

    def describe(self, header: Header) -> None:
        """Store the description of the run."""
        self._send(partial(self._logger.describe, header))

    def log(self, kind: str, iteration: int, numbers: Mapping[str, float | int]) -> None:
        """Send numbers of a step."""
        self._num_points += 1
        self._send(partial(self._log, kind, iteration, dict(numbers)))

    def close(self) -> None:
        """Wait until all queued calls are done, at most for the timeout."""
        if self._has_failed:
            return
        deadline = time.monotonic() + self._close_timeout_s
        with suppress(Full):
            self._calls.put(self._logger.close, timeout=self._close_timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        missing = self._num_points - self._num_arrived
        if not self._has_failed and (missing or self._thread.is_alive()):
            log.warning(
                "%s did not take %d of the %d points of this run in time",
                *(self._thread.name, missing, self._num_points),
            )

    def _send(self, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except Full:
            if not (self._has_dropped or self._has_failed):
                log.warning(
                    "%s is slow or does not answer: %d calls are queued, further calls are "
                    "dropped; training goes on",
                    *(self._thread.name, self._calls.maxsize),
                )
            self._has_dropped = True

    def _log(self, kind: str, iteration: int, numbers: Mapping[str, float | int]) -> None:
        self._logger.log(kind, iteration, numbers)
        self._num_arrived += 1

    def _run(self) -> None:
        """Execute queued calls in order; end after ``close`` or the first error."""
        call = None
        try:
            while call != self._logger.close:
                call = self._calls.get()
                call()
        except Exception as error:  # noqa: BLE001 - a client may raise any error
            self._has_failed = True
            warn_of_failure(self._logger, error)
