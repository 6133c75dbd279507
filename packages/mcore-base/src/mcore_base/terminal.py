"""Long commands at a terminal: a progress line, SIGTERM as an interrupt, sizes as text."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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


def size_text(num_bytes: int) -> str:
    """Write a size with three digits and its unit."""
    size, units = float(num_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def parse_size(text: str, option: str = "--max-shard-size") -> int:
    """Read a size such as ``500MB`` or ``1GiB`` in bytes; ``option`` is for the error."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
    digits = text.rstrip("KMGTIBkmgtib")
    unit = text[len(digits) :].upper()
    try:
        size = int(float(digits) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise ValueError(f"{option} {text} is no size: use a number with MB or GB.")
    return size
