"""The drawing of docs/architecture.md: the wheels as they import each other, and a schedule.

Arrows come from the imports in the sources, folders from the disk, the timeline from
``schedule show``'s own simulator. `uv run python tests/docs/drawing.py` writes
docs/architecture.svg anew.
"""

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.sources import PACKAGES, ROOT, package_sources

from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_parallel.pipeline_parallel.schedule import build_schedule
from mcore_parallel.pipeline_parallel.simulator import simulate
from mcore_parallel.pipeline_parallel.timeline import timeline_svg

PICTURE = ROOT / "docs/architecture.svg"
RANKS, MICROBATCHES = 4, 8
SCHEDULES = ("1f1b", "zb-h1")

SAYS = {
    "train": "a run: from flags to the last checkpoint",
    "infer": "text and scores from a checkpoint",
    "models": "the architecture, one page a layer",
    "moe": "experts for any torch model",
    "ckpt": "logical tensors and files, any layout",
    "data": "text, tokens, exact samples; numpy alone",
    "parallel": "ranks, axes, collectives, gradients",
    "base": "command lines, locks, lazy packages",
}
_COLUMNS = {"models": 0, "moe": 0, "parallel": 0, "base": 1,
            "train": 1, "infer": 1, "ckpt": 0, "data": 2}  # fmt: skip
_COLOURS = {"train": "#7a3b69", "infer": "#a04b4b", "models": "#b5762b", "moe": "#8a8b2c",
            "ckpt": "#2f7f5f", "data": "#2c6e9e", "parallel": "#3b4f8a",
            "base": "#5a5a5a"}  # fmt: skip
_WIDTH, _BOX, _LINE, _GAP, _TOP = 1120, 330, 15, 44, 64


@dataclass(frozen=True, slots=True)
class Box:
    """Where a wheel is drawn, in pixels, and the lines in it."""

    x: int
    y: int
    height: int
    lines: tuple[str, ...]

    @property
    def middle(self) -> int:
        """Its centre, from left to right."""
        return self.x + _BOX // 2


def sibling_imports() -> dict[str, set[str]]:
    """Map each package to the siblings that its sources import when they run."""
    return {
        package: {
            name
            for source in package_sources(package)
            for name in _imports(source.tree)
            if name in PACKAGES and name != package
        }
        for package in PACKAGES
    }


def _imports(tree: ast.AST) -> set[str]:
    """Return the siblings that a file imports, imports for the type checker left out."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0].removeprefix("mcore_"))
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0].removeprefix("mcore_") for alias in node.names}
        else:
            found |= _imports(node)
    return found


def direct(graph: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Return the arrows that no longer way replaces."""
    return {
        (upper, lower)
        for upper, lowers in graph.items()
        for lower in lowers
        if not any(lower in graph[other] for other in lowers - {lower})
    }


def storeys(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return how many packages lie at most below each."""
    height = {}
    while len(height) < len(graph):
        for package, lowers in graph.items():
            if lowers <= height.keys():
                height[package] = 1 + max((height[lower] for lower in lowers), default=-1)
    return height


def floors(package: str) -> list[str]:
    """Return the folders of a package, or its files where it is flat."""
    rooms = [s.room for s in package_sources(package) if s.room and s.room != "__main__"]
    folders = sorted({room.split(".")[0] for room in rooms if "." in room})
    return [f"{name}/" for name in folders] or sorted(rooms)


def _wrapped(words: list[str], width: int = 46) -> list[str]:
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) + 2 > width:
            lines.append("")
        lines[-1] += ("  " if lines[-1] else "") + word
    return lines


def boxes(graph: Mapping[str, set[str]]) -> dict[str, Box]:
    """Place each wheel: lower ones below, columns as the table says."""
    level = storeys(graph)
    found, y = {}, _TOP
    for storey in sorted(set(level.values()), reverse=True):
        texts = {p: _wrapped(floors(p)) for p in PACKAGES if level[p] == storey}
        height = 46 + _LINE * max(len(lines) for lines in texts.values())
        for package, lines in texts.items():
            x = 24 + _COLUMNS[package] * (_BOX + 41)
            found[package] = Box(x, y, height, tuple(lines))
        y += height + _GAP
    return found


def render() -> str:
    """Return the text of the picture."""
    graph = sibling_imports()
    placed = boxes(graph)
    below = max(box.y + box.height for box in placed.values()) + 56
    pictures = [_timeline(name) for name in SCHEDULES]
    height = below + sum(_size(picture)[1] + 34 for picture in pictures)
    scale = min(1.0, (_WIDTH - 48) / max(_size(picture)[0] for picture in pictures))
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    space, fonts = "http://www.w3.org/2000/svg", 'font-family="sans-serif" font-size="12"'
    tip = 'markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto"'
    parts = [
        f'<svg xmlns="{space}" {size} {fonts}>',
        f'<defs><marker id="tip" {tip}>',
        '<path d="M0,0 L9,4 L0,8 z" fill="#555555"/></marker></defs>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="24" y="34" font-size="18">An arrow points to what is imported</text>',
    ]
    parts += [_arrow(placed[upper], placed[lower]) for upper, lower in sorted(direct(graph))]
    parts += [_drawn(package, placed[package]) for package in PACKAGES]
    y = below
    for name, picture in zip(SCHEDULES, pictures, strict=True):
        parts.append(
            f'<text x="24" y="{y}" font-size="14">{name}: a step of {RANKS} pipeline ranks and '
            f"{MICROBATCHES} micro-batches, as the simulator runs it</text>"
        )
        parts.append(f'<g transform="translate(24 {y + 6}) scale({scale:.3f})">{picture}</g>')
        y += _size(picture)[1] + 34
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(package: str, box: Box) -> str:
    colour = _COLOURS[package]
    lines = [
        f'<text x="{box.x + 14}" y="{box.y + 52 + _LINE * i}" font-family="monospace" '
        f'font-size="11" fill="#333333" xml:space="preserve">{escape(line)}</text>'
        for i, line in enumerate(box.lines)
    ]
    frame = f'x="{box.x}" y="{box.y}" height="{box.height}"'
    name = f'font-size="14" font-weight="bold" fill="{colour}">mcore-{package}</text>'
    parts = [
        f'<rect {frame} width="{_BOX}" rx="4" fill="#fafafa" stroke="{colour}"/>',
        f'<rect {frame} width="6" fill="{colour}"/>',
        f'<text x="{box.x + 14}" y="{box.y + 18}" {name}',
        f'<text x="{box.x + 14}" y="{box.y + 35}">{escape(SAYS[package])}</text>',
    ]
    return "\n".join([*parts, *lines])


def _arrow(upper: Box, lower: Box) -> str:
    """Draw from the bottom of one box to the top of another, beside its middle if aslant."""
    lean = max(-1, min(1, lower.x - upper.x)) * 90
    begin, end = upper.middle + lean, lower.middle - lean
    return (
        f'<line x1="{begin}" y1="{upper.y + upper.height}" x2="{end}" y2="{lower.y - 2}" '
        'stroke="#555555" stroke-width="1.5" marker-end="url(#tip)"/>'
    )


def _timeline(name: str) -> str:
    schedule = build_schedule(PipelineConfig(pipeline_schedule=name), RANKS, MICROBATCHES)
    return timeline_svg(simulate(schedule, num_microbatches=MICROBATCHES, num_chunks=1))


def _size(picture: str) -> tuple[int, int]:
    """Return width and height that an SVG begins with."""
    words = picture.split(">", maxsplit=1)[0].split('"')
    return int(words[5]), int(words[7])


if __name__ == "__main__":
    PICTURE.write_text(render())
