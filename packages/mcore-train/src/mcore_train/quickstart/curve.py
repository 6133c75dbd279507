"""A line of numbers as a picture of characters, for a terminal without graphics."""

from collections.abc import Sequence
from itertools import pairwise

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def draw(values: Sequence[float], width: int = 64, height: int = 10, unit: str = "") -> str:
    """Draw values as a filled curve with the highest, middle and lowest value at the side.

    Args:
        values: at least one number; more than ``width`` are averaged in groups.
        width: columns of the curve.
        height: rows of the curve.
        unit: written after the numbers at the side.
    """
    if not values:
        raise ValueError("a curve needs at least one value")
    columns = _columns(values, width)
    low, high = min(columns), max(columns)
    span = (high - low) or 1.0
    # One eighth is left at the bottom, so that the lowest point is seen too.
    levels = [1 + round((value - low) / span * (height * 8 - 1)) for value in columns]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = (_EIGHTHS[max(0, min(8, level - row * 8))] for level in levels)
        value = low + span * (row + 0.5) / height
        shown = row in (height - 1, height // 2, 0)
        side = f"{value:7.3f}{unit} " if shown else " " * (8 + len(unit))
        lines.append(f"{side}|{''.join(cells)}")
    return "\n".join([*lines, " " * (8 + len(unit)) + "+" + "-" * len(columns)])


def _columns(values: Sequence[float], width: int) -> list[float]:
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
