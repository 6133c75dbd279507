"""The picture of docs/serving.md: waiting for tokens while requests arrive as they please.

Medians and 99th percentiles come from a file of ``benchmarks/bench_load.py``.
`uv run python tests/docs/load_picture.py` writes docs/load.svg anew.
"""

import json
from collections.abc import Sequence
from math import floor, log10
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/load.svg"
RESULTS = ROOT / "benchmarks/results/load-llama-3-8b.json"

_SERIES = (
    ("first_ms_p99", "first token, p99", "#3b4f8a", "4 3"),
    ("first_ms_p50", "first token, p50", "#3b4f8a", ""),
    ("between_ms_p99", "between tokens, p99", "#b5762b", "4 3"),
    ("between_ms_p50", "between tokens, p50", "#b5762b", ""),
)
_WIDTH, _HEIGHT, _LEFT, _TOP = 720, 320, 56, 24
_RIGHT, _BOTTOM = _WIDTH - 190, _HEIGHT - 40


def load_chart(cases: Sequence[dict[str, float]]) -> str:
    """Draw milliseconds on a logarithmic axis over requests per second, as SVG."""
    values = [case[key] for case in cases for key, *_ in _SERIES]
    low, high = floor(log10(min(values))), -floor(-log10(max(values)))
    most = max(case["requests_per_s"] for case in cases)

    def place(rate: float, ms: float) -> tuple[float, float]:
        share = (log10(ms) - low) / (high - low)
        return _LEFT + (_RIGHT - _LEFT) * rate / most, _BOTTOM - (_BOTTOM - _TOP) * share

    view = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {view}>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="{_TOP - 8}">milliseconds</text>',
        f'<text x="{_RIGHT}" y="{_BOTTOM + 32}" text-anchor="end">requests per second</text>',
    ]
    for power in range(low, high + 1):
        _, y = place(0, 10**power)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="#dddddd"/>')
        label = f"{10**power:g}"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for case in cases:
        x, _ = place(case["requests_per_s"], 10**low)
        label = f"{case['requests_per_s']:g}"
        parts.append(
            f'<text x="{x:.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{label}</text>'
        )
    for key, name, colour, dashes in _SERIES:
        points = [place(case["requests_per_s"], case[key]) for case in cases]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f'fill="none" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dashes}"'
        parts.append(f'<polyline points="{line}" {style}/>')
        label = f"{name}: {cases[-1][key]:.3g}"
        y = points[-1][1] + 4
        parts.append(
            f'<text x="{_RIGHT + 8}" y="{y:.1f}" fill="{colour}">{escape(label)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def kept_chart() -> str:
    """Draw the kept result."""
    return load_chart(list(json.loads(RESULTS.read_text())["cases"].values()))


if __name__ == "__main__":
    PICTURE.write_text(kept_chart())
