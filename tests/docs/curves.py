"""The picture of docs/training.md: how each architecture learns the shipped book.

Curves come from benchmarks/results/book-curves.json, one line a case of tests/e2e/test_book.py.
`uv run python tests/docs/curves.py` writes docs/book_curves.svg anew; with files of that test
as arguments it takes their curves first.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/book_curves.svg"
RESULTS = ROOT / "benchmarks/results/book-curves.json"

Curve = Sequence[tuple[float, float]]
_COLOURS = (
    "#3b4f8a",
    "#b5762b",
    "#2f7f5f",
    "#a04b4b",
    "#7a3b69",
    "#8a8b2c",
    "#2c6e9e",
    "#555555",
)
_WIDTH, _HEIGHT, _LEFT, _TOP, _LINE = 900, 380, 56, 24, 18


def line_chart(curves: Mapping[str, Curve], x_name: str, y_name: str, x_step: int = 300) -> str:
    """Draw named curves with their last value in the legend, as SVG."""
    xs = [x for curve in curves.values() for x, _ in curve]
    ys = [y for curve in curves.values() for _, y in curve]
    right, bottom = _WIDTH - 330, _HEIGHT - 40
    low, high, far = int(min(ys)), -int(-max(ys) // 1), max(xs)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (right - _LEFT) * x / far,
            bottom - (bottom - _TOP) * (y - low) / (high - low),
        )

    view = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {view}>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
    ]
    for y in range(low, high + 1):
        (x0, y0), (x1, _) = place(0, y), place(far, y)
        parts.append(f'<path d="M{x0:.0f} {y0:.1f}H{x1:.0f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x0 - 8:.0f}" y="{y0 + 4:.1f}" text-anchor="end">{y}</text>')
    for x in range(0, int(far) + 1, x_step):
        at = f'x="{place(x, low)[0]:.0f}" y="{bottom + 16}"'
        parts.append(f'<text {at} text-anchor="middle">{x}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 8}">{escape(y_name)}</text>')
    parts.append(
        f'<text x="{right}" y="{bottom + 32}" text-anchor="end">{escape(x_name)}</text>'
    )
    for i, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        )
        y = _TOP + 10 + _LINE * i
        parts.append(
            f'<rect x="{right + 16}" y="{y - 9}" width="12" height="4" fill="{colour}"/>'
        )
        label = f"{name}: {curve[-1][1]:.2f}"
        parts.append(f'<text x="{right + 34}" y="{y - 2}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def book_curves() -> str:
    """Draw the kept curves."""
    rows = json.loads(RESULTS.read_text())["curves"]
    curves = {row["name"]: [(x, y) for x, y in row["curve"]] for row in rows}
    return line_chart(curves, "steps of 2048 tokens", "training loss, nats per token")


def _take(files: Sequence[str]) -> None:
    kept = json.loads(RESULTS.read_text())
    rows = {row["name"]: row for row in kept["curves"]}
    for file in files:
        row = json.loads(Path(file).read_text())
        rows[row["name"]] = row
    lines = ",\n  ".join(json.dumps(row) for row in rows.values())
    RESULTS.write_text(f'{{"made_by": "{kept["made_by"]}", "curves": [\n  {lines}\n]}}\n')


if __name__ == "__main__":
    _take(sys.argv[1:])
    PICTURE.write_text(book_curves())
