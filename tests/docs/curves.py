"""Pictures of curves: how architectures learn the shipped book, and how experts share work.

Curves of training come from benchmarks/results/{book,balance}-curves.json, one line a case of
tests/e2e/test_book.py; those of a layer whose tokens crowd on few experts from a result of
bench_moe_layer.py. `uv run python tests/docs/curves.py` draws all anew; with files of that test
as arguments it takes their curves first.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
CROWDED = "moe-layer-on-few-h200-x2.json"
OPTIMIZERS = "optimizers-curves-h200.json"
SHORT_QUALITY, LONG_QUALITY = "fp8-quality-h200.json", "fp8-quality-200m-tokens*.json"
_EXCHANGES = {
    "alltoall": "all-to-all",
    "alltoall:1.25": "all-to-all, rows limited to 1.25",
    "allgather:2": "all-gather, fixed rows",
}

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


def line_chart(
    curves: Mapping[str, Curve], x_name: str, y_name: str, x_step: float = 300
) -> str:
    """Draw named curves with their last value in the legend, as SVG; ``x_step`` labels x."""
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
    for i in range(int(far / x_step) + 1):
        at = f'x="{place(i * x_step, low)[0]:.0f}" y="{bottom + 16}"'
        parts.append(f'<text {at} text-anchor="middle">{i * x_step:g}</text>')
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
    """Draw how architectures learn."""
    curves = {row["name"]: row["curve"] for row in _rows("book")}
    return line_chart(curves, "steps of 2048 tokens", "training loss, nats per token")


def balance_curves() -> str:
    """Draw the load of the busiest expert under every way of balancing, with the loss."""
    curves = {
        f"{row['name']}, held-out loss {row['held_out']:.3f}, load": row["curve"]
        for row in _rows("balance")
    }
    y_name = "rows of the busiest of 16 experts, in units of the mean"
    return line_chart(curves, "steps of 2048 tokens", y_name, 100)


def crowded_curves() -> str:
    """Draw time and memory of experts on two GPUs over the share of tokens on one of them."""
    curves = {}
    for name, row in json.loads((RESULTS / CROWDED).read_text())["shapes"].items():
        _, share, exchange = name.split(", ")
        for unit, value in (("ms", row["ms"]), ("GiB", row["peak_gib"])):
            curve = curves.setdefault(f"{_EXCHANGES[exchange]}, {unit}", [])
            curve.append((float(share.split()[0]), value))
    x_name = "share of the tokens that choose the same 8 of 128 experts"
    return line_chart(curves, x_name, "forward and backward, ms; peak memory, GiB", 0.25)


def fp8_curves(files: str, x_step: float) -> str:
    """Draw the losses of the same runs in bf16 and in fp8 over tokens, means of 50 steps."""
    curves = {}
    for path in sorted(RESULTS.glob(files)):
        result = json.loads(path.read_text())
        for run in result["runs"]:
            if run["case"] != "bf16-b":
                name = "bf16" if run["case"] == "bf16" else f"fp8, {run['case']}"
                curves[f"seed {run['seed']}, {name}"] = _means(run, result, 10)
    y_name = "training loss, nats per token, means of 50 steps"
    return line_chart(curves, "millions of tokens", y_name, x_step)


def optimizer_curves() -> str:
    """Draw the losses of the same run under several optimizers, means of 100 steps."""
    result = json.loads((RESULTS / OPTIMIZERS).read_text())
    curves = {run["case"]: _means(run, result, 20) for run in result["runs"]}
    y_name = "training loss, nats per token, means of 100 steps"
    return line_chart(curves, "millions of tokens", y_name, 50)


def _means(run: Mapping, result: Mapping, count: int) -> Curve:
    """Average ``count`` points of a run at a time; the first point is left out."""
    points = run["curve"][1:]  # the first is one step, each other five
    return [
        (
            points[i + count - 1][0] * result["tokens_per_step"] / 1e6,
            sum(loss for _, loss in points[i : i + count]) / count,
        )
        for i in range(0, len(points) - count + 1, count)
    ]


PICTURES = {
    "book_curves.svg": book_curves,
    "expert_balance.svg": balance_curves,
    "fp8_quality.svg": partial(fp8_curves, SHORT_QUALITY, 2),
    "fp8_quality_200m_tokens.svg": partial(fp8_curves, LONG_QUALITY, 50),
    "expert_crowding.svg": crowded_curves,
    "optimizers.svg": optimizer_curves,
}
"""What draws each file of docs."""


def _rows(kind: str) -> list[dict]:
    return json.loads((RESULTS / f"{kind}-curves.json").read_text())["curves"]


def _take(files: Sequence[str]) -> None:
    for file in map(Path, files):
        path = RESULTS / f"{file.name.split('-')[0]}-curves.json"
        kept = json.loads(path.read_text())
        rows = {row["name"]: row for row in kept["curves"]}
        row = json.loads(file.read_text())
        rows[row["name"]] = row
        lines = ",\n  ".join(json.dumps(row) for row in rows.values())
        path.write_text(f'{{"made_by": "{kept["made_by"]}", "curves": [\n  {lines}\n]}}\n')


if __name__ == "__main__":
    _take(sys.argv[1:])
    for file, draw in PICTURES.items():
        (ROOT / "docs" / file).write_text(draw())
