"""Pictures of layouts, drawn by the code that lays ranks, tokens, gradients and files out.

Rank grids come from ``build_grids``, schedules from their lists of actions, a token's experts
from ``route`` and ``plan_rows``, buckets from ``plan_buckets``, boxes from ``flat_boxes``.
`cd tests && python -m docs.pictures` draws all anew.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from house.sources import ROOT

from mcore_ckpt.storage.boxes import intersect
from mcore_models.families import GPT_FAMILY
from mcore_models.presets import find_preset
from mcore_moe.config import MoEConfig
from mcore_moe.dispatch.permutation import plan_rows
from mcore_moe.routing.topk import route
from mcore_parallel.config import ParallelConfig
from mcore_parallel.data_parallel.buckets import plan_buckets, shard_ranges
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_parallel.pipeline_parallel.schedule import build_schedule
from mcore_parallel.pipeline_parallel.simulator import simulate
from mcore_parallel.pipeline_parallel.timeline import timeline_svg
from mcore_parallel.rank_grid import Grid, build_grids
from mcore_parallel.sharding import Box, flat_boxes

COLOURS = (
    *("#3b4f8a", "#b5762b", "#2f7f5f", "#a04b4b"),
    *("#7a3b69", "#8a8b2c", "#2c6e9e", "#5a5a5a"),
)
SCHEDULES = {
    "1f1b": "one stage a rank, one forward and one backward in turns",
    "interleaved": "two chunks of layers a rank (paler: the second)",
    "zb-h1": "backward in two halves; weight gradients fill the ends",
    "zb-v": "two chunks a rank in V form: the first rank has the embedding and the loss",
    "dualpipev": "the V form, a backward beside the forward of the other chunk",
}
RANKS, MICROBATCHES = 4, 8


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    font = 'font-family="sans-serif" font-size="12"'
    back = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    return "\n".join([head, back, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{fill}" {more}/>'
    )


TITLE = 'font-size="15" font-weight="bold"'
NOTE = 'fill="#555555"'
CENTRE = 'text-anchor="middle"'
WHITE = f'{CENTRE} fill="#ffffff"'


def rank_grid() -> str:
    """Draw 16 ranks twice: as the dense layers share them, and as the experts do."""
    config = ParallelConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    dense, expert = build_grids(config, 16)
    parts = [_text(24, 30, "tensor 2, pipeline 2, expert 4 on 16 ranks of two hosts", TITLE)]
    parts += _grid(dense, "tp", "dp", 60, "Dense layers: a colour is a tensor group")
    parts += _grid(expert, "ep", "expert_dp", 290, "Experts: a colour is an expert group")
    return _svg(900, 520, parts)


def _grid(grid: Grid, axis: str, replicas: str, top: int, title: str) -> Iterator[str]:
    groups = grid.groups((axis,))
    colour = {rank: COLOURS[i % 8] for i, group in enumerate(groups) for rank in group}
    yield _text(24, top, title, 'font-size="13"')
    for rank in range(grid.world_size):
        place = grid.coordinates(rank)
        row, column = divmod(rank, 8)
        x, y = 100 + 96 * column, top + 16 + 84 * row
        if column == 0:
            yield _text(24, y + 30, f"host {row}")
            yield _text(24, y + 46, f"stage {place['pp']}", NOTE)
        yield _box(x, y, 90, 70, colour[rank], 'rx="4"')
        yield _text(x + 45, y + 26, f"rank {rank}", f'{WHITE} font-weight="bold"')
        yield _text(x + 45, y + 44, f"{axis} {place[axis]}", WHITE)
        yield _text(x + 45, y + 60, f"{replicas} {place[replicas]}".replace("_", " "), WHITE)


def schedules() -> str:
    """Draw a step of four pipeline ranks and eight micro-batches by each schedule."""
    parts, y, width = [], 16, 0
    for name, text in SCHEDULES.items():
        chunks = 2 if name == "interleaved" else 1
        config = PipelineConfig(
            pipeline_schedule=name, num_virtual_stages_per_pipeline_rank=chunks
        )
        found = simulate(
            build_schedule(config, RANKS, MICROBATCHES),
            num_microbatches=MICROBATCHES,
            num_chunks=config.num_chunks,
            v_shaped=config.v_shaped,
        )
        picture = timeline_svg(found)
        own_width, own_height = (int(picture.split('"')[i]) for i in (5, 7))
        scale = 0.62 if config.num_chunks > 1 else 1.0  # a box is half of a stage
        parts.append(_text(12, y + 12, f"{name}: {text}", TITLE))
        parts.append(f'<g transform="translate(0 {y + 14}) scale({scale})">{picture}</g>')
        width = max(width, round(own_width * scale))
        y += round(own_height * scale) + 40
    return _svg(width, y, parts)


def experts() -> str:
    """Draw eight tokens of two ranks on their way to four experts and back."""
    topk, num_experts = 2, 4
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(8, num_experts, generator=generator)
    routing = route(logits, MoEConfig(num_experts=num_experts, moe_router_topk=topk))
    plan = plan_rows(routing.ids, num_experts)
    parts = [
        _text(24, 30, "Expert parallel 2: four experts, two a token", TITLE),
        _text(60, 60, "tokens", CENTRE),
        _text(430, 60, "rows of each expert, sorted by token: one grouped GEMM a rank", CENTRE),
        _text(800, 60, "sums by weight", CENTRE),
    ]
    token_y = [90 + 44 * token + 30 * (token > 3) for token in range(8)]
    begins = plan.offsets.tolist()
    row_y, y = {}, 76
    for expert in range(num_experts):
        y += 22 + 18 * (expert == 2)
        parts.append(_text(430, y, f"expert {expert}, rank {expert // 2}", f"{CENTRE} {NOTE}"))
        y += 4
        for row in range(begins[expert], begins[expert + 1]):
            row_y[row] = y + 9
            token = int(plan.sources[row])
            parts.append(_box(380, y, 100, 17, COLOURS[token], 'rx="3"'))
            parts.append(_text(430, y + 13, f"token {token}", WHITE))
            y += 20
    for token in range(8):
        shown = COLOURS[token]
        for choice in range(topk):
            row = int(plan.slots[token, choice])
            weight = float(routing.probs[token, choice])
            crosses = (int(routing.ids[token, choice]) // 2) != token // 4
            line = f'stroke="{shown}" fill="none" stroke-width="{1 + 4 * weight:.1f}"'
            line += ' stroke-dasharray="7 4"' * crosses
            y0, y1 = token_y[token] + 12, row_y[row]
            parts.append(f'<path d="M110 {y0}C240 {y0} 250 {y1} 380 {y1}" {line}/>')
            parts.append(f'<path d="M480 {y1}C610 {y1} 620 {y0} 750 {y0}" {line}/>')
        weights = " + ".join(f"{w:.2f}" for w in routing.probs[token].tolist())
        for x, text in ((10, f"token {token}"), (750, weights)):
            parts.append(_box(x, token_y[token], 100, 24, shown, 'rx="4"'))
            parts.append(_text(x + 50, token_y[token] + 16, text, WHITE))
    for rank in range(2):
        parts.append(_text(60, token_y[4 * rank] - 6, f"rank {rank}", f"{CENTRE} {NOTE}"))
    y += 24
    parts.append(_text(24, y, "dashed: through the all-to-all; wider: more weight", NOTE))
    return _svg(870, y + 16, parts)


def buckets() -> str:
    """Draw the gradients of the smallest preset in buckets, shared by four data ranks."""
    preset, num_ranks = find_preset("tiny"), 4
    ctx = ParallelContext.single("cpu")
    model = GPT_FAMILY.build(preset.model.config, ctx, vocab_size=preset.model.vocab_size)
    named = list(model.named_parameters())[::-1]  # backward finishes the last ones first
    sizes = [parameter.numel() for _, parameter in named]
    plans = plan_buckets(sizes, bucket_size=40_000)
    longest = max(plan.size for plan in plans)
    parts = [
        _text(24, 30, "Buckets of the model tiny, four data ranks", TITLE),
        _text(24, 50, "in the order of backward; dashed: what a rank sums and updates", NOTE),
    ]
    y, index = 76, 0
    for number, plan in enumerate(plans):
        scale = 830 / longest
        parts.append(_text(24, y, f"bucket {number}, {plan.size:,} elements"))
        for member, start in zip(plan.members, plan.starts, strict=True):
            x, width = 24 + start * scale, sizes[member] * scale
            parts.append(_box(x, y + 8, max(1.0, width), 34, COLOURS[index % 8]))
            name = named[member][0].removesuffix(".weight")
            if width > 7 * len(name):
                parts.append(_text(x + width / 2, y + 29, name, f'{WHITE} font-size="11"'))
            index += 1
        for rank, (begin, end) in enumerate(shard_ranges(plan.size, num_ranks)):
            x, width = 24 + begin * scale, (end - begin) * scale
            edge = 'stroke="#333333" stroke-dasharray="3 2"'
            parts.append(_box(x, y + 4, width, 60, "none", edge))
            parts.append(_text(x + width / 2, y + 58, f"rank {rank}", CENTRE))
        y += 100
    return _svg(880, y, parts)


def checkpoint_boxes() -> str:
    """Draw a matrix as four ranks save it and two others read it."""
    rows, columns, cell = 8, 12, 30
    half = (rows, columns // 2)
    parts = [_text(24, 30, "One logical tensor of 8 x 12, saved and loaded", TITLE)]
    saved: list[tuple[int, Box]] = []
    for tensor_rank in range(2):
        for data_rank, (begin, end) in enumerate(((0, 27), (27, 48))):
            for offsets, lengths in flat_boxes(half, begin, end):
                place = offsets[0], offsets[1] + tensor_rank * half[1]
                saved.append((2 * data_rank + tensor_rank, (place, lengths)))
    parts.append(_text(24, 60, "Saved under tensor 2 x data 2, ZeRO-1:"))
    parts.append(_text(24, 76, f"{len(saved)} boxes in the files of four ranks", NOTE))
    parts += _matrix(24, 90, rows, columns, cell)
    for rank, (offsets, lengths) in saved:
        x, y = 24 + offsets[1] * cell, 90 + offsets[0] * cell
        size = lengths[1] * cell, lengths[0] * cell
        parts.append(_box(x, y, *size, COLOURS[rank], 'stroke="#ffffff" stroke-width="2"'))
        text = f"rank {rank}" if size[0] > 45 else str(rank)
        parts.append(_text(x + size[0] / 2, y + size[1] / 2 + 4, text, WHITE))
    left = 24 + columns * cell + 80
    wanted: Box = ((4, 0), (4, columns))
    read = [(rank, box) for rank, each in saved if (box := intersect(each, wanted))]
    parts.append(_text(left, 60, "Loaded under data 2, sharded by rows (FSDP):"))
    parts.append(_text(left, 76, f"rank 1 reads {len(read)} boxes or parts of boxes", NOTE))
    parts += _matrix(left, 90, rows, columns, cell)
    for rank, (offsets, lengths) in read:
        x, y = left + offsets[1] * cell, 90 + offsets[0] * cell
        size = lengths[1] * cell, lengths[0] * cell
        parts.append(_box(x, y, *size, COLOURS[rank], 'stroke="#ffffff" stroke-width="2"'))
        text = f"from rank {rank}" if size[0] > 90 else str(rank)
        parts.append(_text(x + size[0] / 2, y + size[1] / 2 + 4, text, WHITE))
    outline = 'stroke="#a04b4b" stroke-width="3"'
    parts.append(_box(left, 90 + 4 * cell, columns * cell, 4 * cell, "none", outline))
    return _svg(left + columns * cell + 24, 90 + rows * cell + 24, parts)


def _matrix(x: int, y: int, rows: int, columns: int, cell: int) -> Iterator[str]:
    yield _box(x, y, columns * cell, rows * cell, "#f3f3f3", 'stroke="#bbbbbb"')


PICTURES: dict[str, Callable[[], str]] = {
    "rank_grid.svg": rank_grid,
    "schedules.svg": schedules,
    "experts.svg": experts,
    "buckets.svg": buckets,
    "checkpoint_boxes.svg": checkpoint_boxes,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ROOT / "docs" / name).write_text(draw())
