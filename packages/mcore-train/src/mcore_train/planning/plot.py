"""Draws the best layouts as SVG: time of a step by part, memory by kind."""

from collections.abc import Mapping, Sequence
from html import escape

from mcore_train.planning.memory import GIB
from mcore_train.planning.search import Row

_LEFT, _WIDTH, _ROW, _TOP = 330, 360, 26, 74
_GAP = 70
_TIME = {
    "gemm": "#1f4e79",
    "experts": "#2e75b6",
    "attention": "#7fb2dd",
    "other kernels": "#bfd7ea",
    "tp": "#c00000",
    "cp": "#e06666",
    "ep": "#f4a6a6",
    "fsdp": "#990055",
    "dp": "#d98cb3",
    "bubble": "#bbbbbb",
    "optimizer": "#7a9a01",
    "offload": "#b8cc5a",
    "host waits": "#e0a800",
    "host": "#f3d27a",
}
_MEMORY = {
    "weights": "#1f4e79",
    "gradients": "#2e75b6",
    "optimizer": "#7a9a01",
    "activations": "#e0a800",
    "buffers": "#c00000",
    "fragmentation": "#bbbbbb",
}


def plot_svg(rows: Sequence[Row], memory_gib: float, title: str) -> str:
    """Return an SVG with two bars per layout: seconds of a step, GiB of the fullest rank.

    Args:
        rows: best first; ten are drawn.
        memory_gib: of the device, which a line marks.
        title: above the bars.
    """
    rows = rows[:10]
    longest = max(row.step.total for row in rows)
    fullest = max(memory_gib, *(row.memory.total / GIB for row in rows))
    right = _LEFT + _WIDTH + _GAP
    limit = right + memory_gib / fullest * _WIDTH
    width, height = right + _WIDTH + 60, _TOP + _ROW * len(rows) + 86
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">'
        ),
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="14">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="{_TOP - 14}">time of a step</text>',
        f'<text x="{right}" y="{_TOP - 14}">memory of the fullest rank</text>',
    ]
    for index, row in enumerate(rows):
        y = _TOP + _ROW * index
        parts.append(
            f'<text x="12" y="{y + 15}" textLength="{min(300, 6 * len(row.name) + 18)}" '
            f'lengthAdjust="spacingAndGlyphs">{index + 1}. {escape(row.name)}</text>'
        )
        total = row.step.total
        parts += _bar(row.step.parts, _TIME, _LEFT, y, _WIDTH / longest, "s")
        label = f"{total:.2f} s" if total >= 1 else f"{1e3 * total:.0f} ms"
        parts.append(
            f'<text x="{_LEFT + total / longest * _WIDTH + 4:.0f}" y="{y + 15}">{label}</text>'
        )
        memory_parts = _memory_parts(row)
        parts += _bar(memory_parts, _MEMORY, right, y, _WIDTH / fullest, "GiB")
        x = right + sum(memory_parts.values()) / fullest * _WIDTH + 4
        if x < limit + 4 < x + 30:  # keep the number clear of the limit's line
            x = limit + 4
        parts.append(f'<text x="{x:.0f}" y="{y + 15}">{sum(memory_parts.values()):.0f}</text>')
    bottom = _TOP + _ROW * len(rows)
    parts.append(
        f'<line x1="{limit:.1f}" y1="{_TOP - 6}" x2="{limit:.1f}" y2="{bottom}" '
        'stroke="#000000" stroke-dasharray="4 3"/>'
        f'<text x="{limit:.1f}" y="{bottom + 12}" text-anchor="end">'
        f"{memory_gib:.0f} GiB</text>"
    )
    shown = {part for row in rows for part in row.step.parts}
    parts += _legend([part for part in _TIME if part in shown], _TIME, _LEFT, bottom + 34)
    parts += _legend(list(_MEMORY), _MEMORY, right, bottom + 34)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _memory_parts(row: Row) -> dict[str, float]:
    gib_by_kind = dict.fromkeys(_MEMORY, 0.0)
    for name, size in row.memory.parts.items():
        gib_by_kind[name.partition(":")[0]] += size / GIB
    return gib_by_kind | {"fragmentation": row.memory.fragmentation / GIB}


def _bar(
    values: Mapping[str, float],
    colours: Mapping[str, str],
    x: float,
    y: int,
    scale: float,
    unit: str,
) -> list[str]:
    parts = []
    for name, colour in colours.items():
        if not (value := values.get(name, 0.0)):
            continue
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="{_ROW - 6}" '
            f'fill="{colour}"><title>{name}: {value:.3g} {unit}</title></rect>'
        )
        x += value * scale
    return parts


def _legend(names: Sequence[str], colours: Mapping[str, str], left: int, y: int) -> list[str]:
    parts, x = [], float(left)
    for name in names:
        step = 30 + 6.5 * len(name)  # font of 11 px, wide letters
        if x + step > left + _WIDTH + 40:
            x, y = left, y + 17
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" fill="{colours[name]}"/>'
            f'<text x="{x + 14:.0f}" y="{y}">{name}</text>'
        )
        x += step
    return parts
