"""Long commands at a terminal: progress, SIGTERM as an interrupt, sizes and curves as text."""

import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def progress_line() -> Callable[[int, int, str], None] | None:
    """Return a function that draws a line of progress on standard error.

    Returns:
        Function of bytes done, bytes in total and a name; None if standard error is no
        terminal.
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
    """Raise KeyboardInterrupt on SIGTERM, so that half-written outputs are removed too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    old_handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)


def curve_text(
    points: Sequence[tuple[float, float]],
    marks: Sequence[tuple[float, float]] = (),
    *,
    width: int = 60,
    rows: int = 8,
) -> str:
    """Draw a curve with block characters and mark other points in it with ``o``.

    Args:
        points: x and y of the curve, at least one; x from 0 on, in ascending order.
        marks: x and y of the marked points.
        width: columns of the plot, without the axis.
        rows: lines of the plot; each has eight levels.
    """
    values = [y for _, y in (*points, *marks)]
    low, high = math.floor(min(values)), math.floor(max(values)) + 1
    x_end = max(x for x, _ in (*points, *marks)) or 1

    def column(x: float) -> int:
        return min(width - 1, int(x / x_end * width))

    def level(y: float) -> float:
        return (y - low) / (high - low) * rows

    # A column without a point takes the next one, so that the area has no gaps.
    levels: list[float] = []
    for x, y in points:
        missing = column(x) + 1 - len(levels)
        if missing > 0:
            levels += [level(y)] * missing
        else:
            levels[-1] = level(y)
    grid = []
    for row in reversed(range(rows)):
        minimum = 1 if row == 0 else 0  # the curve's lowest point is visible too
        eighths = (min(8, max(minimum, round(8 * (each - row)))) for each in levels)
        grid.append([" ▁▂▃▄▅▆▇█"[each] for each in eighths] + [" "] * (width - len(levels)))
    for x, y in marks:
        grid[rows - 1 - min(rows - 1, int(level(y)))][column(x)] = "o"
    axis = [f"{high:4d} ", *["     "] * (rows - 2), f"{low:4d} "]
    lines = [
        f"{left}|{''.join(cells)}".rstrip() for left, cells in zip(axis, grid, strict=True)
    ]
    end = f"{x_end:g}"
    return "\n".join([*lines, f"     0{end:>{width}}"])


def size_text(num_bytes: int) -> str:
    """Return a size as text, with three digits and a unit."""
    size, units = float(num_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def parse_size(text: str, option: str = "--max-shard-size") -> int:
    """Return the bytes of a size such as ``500MB`` or ``1GiB``; errors name ``option``."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
    digits = text.rstrip("KMGTIBkmgtib")
    unit = text[len(digits) :].upper()
    try:
        size = int(float(digits) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise ValueError(
            f"{option} {text} is not a size: give a number with a unit, such as 500MB."
        )
    return size
