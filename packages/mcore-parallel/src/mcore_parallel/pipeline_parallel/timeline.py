"""Draws a simulated schedule: text for the terminal, SVG for a page."""

from collections import Counter

from mcore_parallel.pipeline_parallel.actions import Kind
from mcore_parallel.pipeline_parallel.simulator import Simulation, Span

_COLOURS = {
    Kind.FORWARD: ("#3b6fb6", "#8fb1de", "#c5d7ef"),
    Kind.BACKWARD: ("#2f8f5b", "#86c7a3", "#c4e4d2"),
    Kind.BACKWARD_INPUT: ("#2f8f5b", "#86c7a3", "#c4e4d2"),
    Kind.BACKWARD_WEIGHT: ("#b5651d", "#dba878", "#efd6bf"),
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input",
    Kind.BACKWARD_WEIGHT: "backward, weight",
}
_UNIT, _ROW, _LEFT, _TOP = 22, 26, 64, 44


def timeline_text(simulation: Simulation) -> str:
    """Draw a schedule as text, a line per rank and a column per unit of time.

    The unit is the shortest computation. A cell reads ``F3``, ``B3``, ``I3`` or ``W3`` for
    micro-batch 3, ``F3.1`` on chunk 1, ``F3&B1`` for a pair; longer computations continue as
    dashes, and dots are idle time.
    """
    spans = [span for rank in simulation.spans for span in rank]
    unit = min((span.end - span.start for span in spans), default=1.0)
    rows = [_names(row) for row in simulation.spans]
    width = max((len(name) for row in rows for name in row.values()), default=1)
    num_columns = round(simulation.makespan / unit)
    lines = []
    for rank, row in enumerate(rows):
        cells: list[str] = ["." * width] * num_columns
        for (start, stop), name in row.items():
            begin, end = round(start / unit), round(stop / unit)
            cells[begin:end] = ["-" * width] * (end - begin)
            cells[begin] = name.ljust(width)
        lines.append(f"rank {rank:<3}" + " ".join(cells))
    lines.append(
        f"bubble {simulation.bubble_fraction:.1%} of the work, "
        f"activations held at most {simulation.peak_activations}"
    )
    return "\n".join(lines)


def _names(row: list[Span]) -> dict[tuple[float, float], str]:
    """Return the names of the computations of one rank by (start, end)."""
    names: dict[tuple[float, float], str] = {}
    for span in row:
        time = span.start, span.end
        names[time] = names.get(time, "") + str(span.action)
    return names


def timeline_svg(simulation: Simulation) -> str:
    """Draw a schedule as SVG: a row per rank, a box with the micro-batch per computation.

    Later chunks have paler colours. A pair shows its forward in the upper half of the row.
    """
    spans = [span for rank in simulation.spans for span in rank]
    unit = min((span.end - span.start for span in spans), default=1.0)
    scale = _UNIT / unit
    width = round(_LEFT + simulation.makespan * scale + 12)
    height = _TOP + _ROW * len(simulation.spans) + 36
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">'
        ),
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        (
            f'<text x="12" y="24" font-size="14">bubble {simulation.bubble_fraction:.1%} of '
            f"the work; activations held at most {simulation.peak_activations}</text>"
        ),
    ]
    for rank, row in enumerate(simulation.spans):
        y = _TOP + _ROW * rank
        parts.append(f'<text x="12" y="{y + 16}">rank {rank}</text>')
        times = Counter((span.start, span.end) for span in row)
        for span in row:
            parts.append(_box(span, y, scale, in_pair=times[span.start, span.end] > 1))
    parts += _legend({span.action.kind for span in spans}, height - 18)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(span: Span, y: int, scale: float, *, in_pair: bool) -> str:
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    height, base, size = _ROW - 4, 15, ""
    if in_pair:
        height, base, size = height // 2, 9, ' font-size="9"'
        y += 0 if span.action.is_paired else height
    shades = _COLOURS[span.action.kind]
    shade = min(span.action.chunk, len(shades) - 1)
    ink = "#ffffff" if shade == 0 else "#000000"
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" '
        f'fill="{shades[shade]}" stroke="#ffffff"><title>{span.action}</title></rect>'
        f'<text x="{x + width / 2:.1f}" y="{y + base}"{size} text-anchor="middle" '
        f'fill="{ink}">{span.action.microbatch}</text>'
    )


def _legend(kinds: set[Kind], y: int) -> list[str]:
    parts, x = [], _LEFT
    for kind, name in _NAMES.items():
        if kind in kinds:
            parts.append(
                f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_COLOURS[kind][0]}"/>'
                f'<text x="{x + 14}" y="{y}">{name}</text>'
            )
            x += 130
    return parts
