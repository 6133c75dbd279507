"""What long commands share at a terminal: a line of progress, and an end that cleans up."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mcore_base.sizes import size_text


def progress_line() -> Callable[[int, int, str], None] | None:
    """Draw a line of progress on standard error, if that is a terminal.

    Returns:
        What to call with bytes done, bytes in all and a name; None: no terminal.
    """
    stream = sys.stderr
    if not stream.isatty():
        return None
    shown = -1

    def show(done: int, total: int, name: str) -> None:
        nonlocal shown
        percent = 100 * done // max(1, total)
        if percent != shown:
            shown = percent
            end = "\n" if done == total else ""
            stream.write(f"\r{percent:3d} % of {size_text(total)}  {name:60.60}{end}")
            stream.flush()

    return show


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM what SIGINT is, so that a half-written output goes away with it too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
