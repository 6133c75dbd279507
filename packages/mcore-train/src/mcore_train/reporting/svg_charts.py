"""Draws SVG charts for an HTML page: lines over steps, and stacked bars by step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 14, 30
COLORS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
"""Colors of lines, in order."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    """Steps and finite values, in order."""
    color: str
    is_dashed: bool = False


def line_chart(lines: Sequence[Line]) -> str:
    """Draw lines over steps; return "" without points."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / ((last - first) or 1)
        up = (y - low) / (high - low)
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM),
        )

    parts = [_frame(), *_y_axis(low, high, place), *_x_axis(first, last, place)]
    for line in lines:
        coordinates = [place(x, y) for x, y in _thin(line.points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in coordinates)
        dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="1.6"'
            f"{dash}><title>{escape(line.name)}</title></polyline>"
        )
        if len(coordinates) == 1:
            x, y = coordinates[0]
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{line.color}"/>')
    return "".join([*parts, "</svg>"])


def stacked_bars(
    rows: Sequence[tuple[int, Mapping[str, float]]], colors: Mapping[str, str]
) -> str:
    """Draw a stacked bar for each step, from below in the order of ``colors``.

    Args:
        rows: step and its parts by name; the height of a bar is the sum of its parts.
        colors: color of each part.
    """
    if not rows:
        return ""
    highest = max(sum(parts.values()) for _, parts in rows) or 1.0
    width = (WIDTH - _LEFT - _RIGHT) / len(rows)
    scale = (HEIGHT - _TOP - _BOTTOM) / highest

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (x + 0.5) * width, HEIGHT - _BOTTOM - y * scale

    drawn = [_frame(), *_y_axis(0.0, highest, place)]
    for number, (step, parts) in enumerate(rows):
        bottom = 0.0
        for name, color in colors.items():
            value = parts.get(name, 0.0)
            if value <= 0:
                continue
            x, y = place(number, bottom + value)
            drawn.append(
                f'<rect x="{x - 0.45 * width:.1f}" y="{y:.1f}" width="{0.9 * width:.1f}" '
                f'height="{value * scale:.1f}" fill="{color}">'
                f"<title>step {step}: {escape(name)} {value:.4g} ms</title></rect>"
            )
            bottom += value
    for number in {0, len(rows) - 1}:
        x, _ = place(number, 0)
        drawn.append(_text(x, HEIGHT - 10, str(rows[number][0]), "middle"))
    return "".join([*drawn, "</svg>"])


def _frame() -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg" '
        'font-size="11" fill="#57606a">'
    )


def _y_axis(low: float, high: float, place) -> list[str]:
    drawn = []
    for value in _ticks(low, high):
        _, y = place(0, value)
        drawn.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="#d0d7de"/>'
        )
        drawn.append(_text(_LEFT - 6, y + 4, f"{value:.4g}", "end"))
    return drawn


def _x_axis(first: float, last: float, place) -> list[str]:
    values = [v for v in _ticks(first, last) if v == int(v)] or [first]
    return [_text(place(v, 0)[0], HEIGHT - 10, f"{v:g}", "middle") for v in values]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """Return four or so round numbers in a range."""
    if high <= low:
        return [low]
    raw = (high - low) / 4
    size = 10 ** math.floor(math.log10(raw))
    step = size * min((1, 2, 5, 10), key=lambda factor: abs(factor * size - raw))
    first = math.ceil(low / step)
    return [round(n * step, 12) for n in range(first, math.floor(high / step) + 1)]


def _thin(points: Sequence[tuple[float, float]], limit: int = 600) -> list[tuple[float, float]]:
    """Reduce many points to the lowest and the highest point of each interval."""
    if len(points) <= limit:
        return list(points)
    length = -(-2 * len(points) // limit)
    extremes = []
    for begin in range(0, len(points), length):
        interval = points[begin : begin + length]
        extremes += sorted(
            {min(interval, key=lambda p: p[1]), max(interval, key=lambda p: p[1])}
        )
    return extremes
