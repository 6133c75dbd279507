"""The page of measured performance, from files of benchmarks/results.

``uv run python tests/docs/performance_page.py`` writes docs/performance.md and its pictures.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs import performance_peers
from house.sources import ROOT

PAGE = ROOT / "docs/performance.md"
PICTURE = ROOT / "docs/performance.svg"
PARTS_PICTURE = ROOT / "docs/performance_parts.svg"
SCALING_PICTURE = ROOT / "docs/performance_scaling.svg"
PEERS_PICTURE = ROOT / "docs/performance_peers.svg"
RESULTS = ROOT / "benchmarks/results"
PEAK_TFLOPS = 989.0
"""Dense bf16 peak of an H100 or H200 SXM, from NVIDIA's data sheets."""
RUNS = {
    "GPT, 345 M": "gpt2-345m-h200-x1-graphs-full_iteration",
    "Mamba-2, 2.7B, 16 of 64 layers": "mamba2-2.7b-16-layers-h200",
    "Llama-3-8B": "llama-3-8b-h200-x4-dp4-gbs16",
    "Llama-3-8B, fp8": "llama-3-8b-h200-x4-dp-fp8",
    "Llama-3-8B, 262 144 tokens": "llama-3-8b-262k-h200-x2-cp",
    "Llama-2-13B": "llama-2-13b-h200-x2-zero3",
    "30B (60 layers of 6656)": "llama-30b-h200-x4-zero3",
    "Llama-3-70B": "llama-70b-h200-x4-zero3-bf16-states",
    "Qwen3-30B-A3B, 20 of 48 layers": "qwen3-30b-h200-x4-ep-allgather",
    "Mixtral-8x7B, 4 of 32 layers": "mixtral-8x7b-4-layers-h200-x2-ep2",
    "DeepSeek-V2-Lite, 9 of 27 layers": "deepseek-v2-lite-9-layers-h200",
    "Qwen3-Next, 4 of 48 layers": "qwen3-next-4-layers-h200",
    "Nemotron-H-8B, 8 of 52 layers": "nemotron-h-8b-8-layers-h200",
}
"""Best measured run of each model, by the name of its file."""
PARTS = {
    "gemm": ("GEMMs", "#3b4f8a"),
    "attention": ("attention", "#2f7f5f"),
    "elementwise": ("elementwise", "#b5762b"),
    "copy": ("copies", "#8a8b2c"),
    "exposed_communication": ("exposed communication", "#a04b4b"),
    "gap": ("waiting for the host", "#bbbbbb"),
}
"""Parts of a profiled step, which add up to it: name and colour."""
RECIPES = {
    "bf16": "bf16",
    "fp8-delayed": "fp8, `delayed`: factors of earlier steps",
    "fp8-tensorwise": "fp8, `tensorwise`: one factor a tensor",
    "fp8-rowwise": "fp8, `rowwise`: one factor a row",
    "fp8-blockwise": "fp8, `blockwise`: one factor for 128 numbers",
}
DECODING = {
    "mcore, bf16": ("decode-llama-3-8b-beside-vllm-h200", ""),
    "vLLM 0.25.1, bf16, the same day": ("vllm-llama-3-8b-h200", ""),
    "transformers, bf16": ("decode-llama-3-8b-h200", "transformers "),
    "mcore, fp8 weights": ("decode-llama-3-8b-fp8-h200", ""),
    "mcore, int8 weights": ("decode-llama-3-8b-int8-h200", ""),
    "mcore, weights of 4 bits (AWQ)": ("decode-llama-3-8b-awq-h200", ""),
}
"""Files of decoding, and what the names of their cases begin with."""
INTRODUCTION = """\
Written by `tests/docs/performance_page.py` from files of `benchmarks/results`: random
tokens, bf16 unless a row names another format, H200 SXM, torch 2.11. How they were
measured, and all other measurements: [benchmarks](../benchmarks/README.md). What
layouts on more GPUs would take is [predicted](planner.md), not measured.

MFU is the model's FLOPs per second over the peak: tokens per second of a GPU, times the
FLOPs of a token, over {peak:.0f} TFLOP/s, the dense bf16 peak of an H100 or H200 SXM
(also in fp8, whose own peak is twice that). The FLOPs of a token are three times those
of its forward pass: 2 for each weight of a matrix that the token passes, and for each
layer's causal attention over S tokens and D channels S D for the scores and S D for the
values. Recomputation is not counted as work.
"""
DEGREES = {
    "tensor": "tensor-model-parallel-size",
    "pipeline": "pipeline-model-parallel-size",
    "context": "context-parallel-size",
    "expert": "expert-model-parallel-size",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run on ``num_gpus`` GPUs."""

    model: str
    name: str
    num_gpus: int
    layout: str
    tokens_per_s: float
    """Of each GPU."""
    tflops: float
    """Model FLOPs of each GPU, with causal attention."""
    peak_gib: float

    @property
    def mfu(self) -> float:
        """Share of the bf16 peak."""
        return self.tflops / PEAK_TFLOPS


def read(name: str) -> dict[str, Any]:
    """Read a result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def layout_of(flags: str, num_gpus: int) -> str:
    """Describe the degrees and the sharding that flags ask for."""
    found = {
        axis: int(match[1])
        for axis, flag in DEGREES.items()
        if (match := re.search(rf"--{flag} (\d+)", flags))
    }
    data = num_gpus
    for axis in ("tensor", "pipeline", "context"):
        data //= found.get(axis, 1)
    parts = [f"{axis} {degree}" for axis, degree in found.items() if degree > 1]
    parts += [f"data {data}"] * (data > 1)
    if "--use-torch-fsdp2" in flags or "optim_grads_params" in flags:
        parts.append("ZeRO-3")
    elif "--use-distributed-optimizer" in flags and data > 1:
        parts.append("ZeRO-1")
    if "--recompute-granularity full" in flags:
        parts.append("recomputed")
    return ", ".join(parts) or "one GPU"


def measured_runs() -> list[Measured]:
    """Read the best run of each model."""
    found = []
    for model, name in RUNS.items():
        row = read(name)
        tflops = row.get("tflops_per_gpu") or row["tflops"]
        layout = layout_of(row["flags"], row["num_gpus"])
        figures = row["tokens_per_s_per_gpu"], tflops, row["peak_gib"]
        found.append(Measured(model, name, row["num_gpus"], layout, *figures))
    return found


def scaling_rows() -> Iterator[tuple[str, Sequence[float]]]:
    """Yield a name and the tokens per second of a GPU on 1, 2 and 4 GPUs of one host."""
    dense = [read(f"llama-3-8b-8-layers-x{n}-of-4")["ways"] for n in (1, 2, 4)]
    for way, text in (("weak", "the same work on each GPU"), ("strong", "16 sequences in all")):
        rates = [each[way]["tokens_per_s_per_gpu"] for each in dense if way in each]
        if len(rates) == len(dense):
            yield f"8 layers of Llama-3-8B, {text}", rates
    experts = [read(f"qwen3-30b-4-layers-weak-x{n}-of-4") for n in (1, 2, 4)]
    yield (
        "4 layers of Qwen3-30B-A3B, expert parallel, the same work on each GPU",
        [each["tokens_per_s_per_gpu"] for each in experts],
    )


def _table(head: str, rows: Sequence[Sequence[object]]) -> list[str]:
    """Write a table; the head has its columns between bars."""
    columns = [cell.strip() for cell in head.split("|")]
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def _link(text: str, name: str) -> str:
    return f"[{text}](../benchmarks/results/{name}.json)"


def schedule_rows() -> Iterator[Sequence[object]]:
    """Yield each schedule of Llama-3-8B in four stages, measured and predicted."""
    for name in ("llama-3-8b-pp4-schedules-h200-x4", "llama-3-8b-pp-schedules-h200-x4"):
        for schedule, row in read(name)["schedules"].items():
            predicted = row["predicted_ms"]
            yield (
                _link(schedule, name),
                f"{row['ms']:,.0f}",
                f"{predicted:,.0f}",
                f"{predicted / row['ms'] - 1:+.1%}",
                f"{row['peak_gib']:.1f}",
            )


def fp8_rows() -> Iterator[Sequence[object]]:
    """Yield each format of 8 layers of Llama-3-8B, measured in one process."""
    name = "llama-3-8b-8-layers-fp8-recipes-h200-x1"
    cases = read(name)["cases"]
    for case, text in RECIPES.items():
        row = cases[case]
        faster = cases["bf16"]["step_ms"] / row["step_ms"]
        gemm, other = row["split_ms"]["gemm"], row["split_ms"]["elementwise"]
        step = f"{row['step_ms']:.0f}"
        yield text, step, f"{faster:.2f}", f"{gemm:.0f}", f"{other:.0f}"


def decode_rows() -> Iterator[Sequence[object]]:
    """Yield tokens per second of Llama-3-8B by program and format of its weights."""
    bf16 = read(DECODING["mcore, bf16"][0])["roofline_tokens_per_s"]
    for text, (name, prefix) in DECODING.items():
        row = read(name)
        rates = [row["cases"][f"{prefix}batch {count}"]["tokens_per_s"] for count in (1, 32)]
        bound = row.get("roofline_tokens_per_s", bf16)
        yield _link(text, name), *(f"{rate:,.0f}" for rate in rates), f"{bound:,.0f}"


def data_rows() -> Iterator[Sequence[object]]:
    """Yield what the data path does on two CPU cores."""
    bpe, words = read("preprocess-bpe-sample"), read("preprocess-wordpiece")
    index, loader = read("index"), read("loader")
    text = "text to tokens, byte pairs of Llama 3"
    yield _link(text, "preprocess-bpe-sample"), f"{bpe['mtokens_per_s']:.1f} M tokens/s"
    text = "text to tokens, WordPiece"
    yield _link(text, "preprocess-wordpiece"), f"{words['mtokens_per_s']:.1f} M tokens/s"
    text = f"sample index of {index['documents'] / 1e6:.0f} M documents"
    yield _link(text, "index"), f"{index['index_gtokens_per_s']:.1f} G tokens/s"
    text = "batches from the page cache, one core"
    yield _link(text, "loader"), f"{loader['gpt_mtokens_per_s']:.0f} M tokens/s"


def step_rows() -> Iterator[Sequence[object]]:
    """Yield every training step that has a file of its own."""
    for path in sorted(RESULTS.glob("*.json")):
        row = read(path.stem)
        if not isinstance(row, dict) or not {"step_ms", "flags", "peak_gib"} <= row.keys():
            continue
        tflops = row.get("tflops_per_gpu") or row.get("tflops")
        spread = f"{row['step_ms_p10']:,.0f} to {row['step_ms_p90']:,.0f}"
        yield (
            _link(path.stem, path.stem),
            row["num_gpus"],
            f"{row['step_ms']:,.0f}",
            spread,
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{tflops:.0f}" if tflops else "",
            f"{row['peak_gib']:.1f}",
        )


def shown_scaling_rows() -> Iterator[Sequence[object]]:
    """Yield the rows of scaling as text, with the rate on four GPUs over that on one."""
    for name, rates in scaling_rows():
        yield name, *(f"{rate:,.0f}" for rate in rates), f"{rates[2] / rates[0]:.1%}"


SECTIONS = (
    (
        "Beside other programs",
        performance_peers.INTRODUCTION,
        performance_peers.HEAD,
        partial(performance_peers.rows, read),
    ),
    (
        "Goals missed",
        "Where the time goes, by a profiled step, and what was tried.",
        performance_peers.MISSES_HEAD,
        partial(performance_peers.miss_rows, read),
    ),
    (
        "Scaling on one host",
        """\
![Tokens per second of each GPU, over one GPU](performance_scaling.svg)

More than one host was not measured; 64 GPUs and more are [predicted](recipes.md).""",
        "work | 1 GPU, tokens/s | 2 GPUs, of each | 4 GPUs, of each | 4 GPUs over 1",
        shown_scaling_rows,
    ),
    (
        "Pipeline schedules",
        """\
Llama-3-8B in four stages on four H200s, 16 micro-batches of 8 192 tokens, on two hosts. The
prediction is the simulator's, from the time of each stage.""",
        "schedule | step, ms | predicted | error | GiB of the fullest rank",
        schedule_rows,
    ),
    (
        "fp8",
        """\
8 layers of Llama-3-8B on one H200, four micro-batches of 8 192 tokens, all in one process.""",
        "format | step, ms | times as fast | GEMMs, ms | elementwise, ms",
        fp8_rows,
    ),
    (
        "Decoding",
        """\
Llama-3-8B on one H200, tokens per second of all texts together. The bound is the memory's
bandwidth over the bytes of the weights. More in [Serving](serving.md).""",
        "program and weights | 1 text | 32 texts | bound of 1 text",
        decode_rows,
    ),
    ("Data", "On two CPU cores.", "what | rate", data_rows),
    (
        "Every training step with a file of its own",
        """\
Names have the model, layers, GPUs and what was tried; the files have flags, versions, commit
and the split of a profiled step. What was learned from them is in
[the measurements in full](../benchmarks/README.md).""",
        "file | GPUs | step, ms | p10 to p90 | tokens/s of a GPU | TFLOP/s | peak GiB",
        step_rows,
    ),
)
"""Title, text, head of the table and its rows."""


def render() -> str:
    """Write the page."""
    lines = [
        "# Benchmarks",
        "",
        *INTRODUCTION.format(peak=PEAK_TFLOPS).splitlines(),
        "",
        "![Share of the bf16 peak by model](performance.svg)",
        "",
        "| model | GPUs | layout | tokens/s of a GPU | TFLOP/s of a GPU | MFU | peak GiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| [{run.model}](../benchmarks/results/{run.name}.json) | {run.num_gpus} "
        f"| {run.layout} | {run.tokens_per_s:,.0f} | {run.tflops:.0f} | {run.mfu:.1%} "
        f"| {run.peak_gib:.1f} |"
        for run in measured_runs()
    ]
    lines += [
        "",
        "Megatron's published MFU is 41 to 48 % for dense models of 2 to 462 billion",
        "parameters on up to 6 144 H100s; these are one to four GPUs, which exchange less.",
        "",
        "## Where a step's time goes",
        "",
        "![Shares of a profiled step by model](performance_parts.svg)",
        "",
    ]
    for title, text, head, rows in SECTIONS:
        lines += [f"## {title}", "", *text.splitlines(), "", *_table(head, [*rows()]), ""]
    return "\n".join(lines)


def draw() -> str:
    """Draw the share of the peak of each run as bars."""
    runs = measured_runs()
    height = 24 * len(runs) + 30
    parts = [_head(760, height)]
    for index, run in enumerate(runs):
        y, width = 24 * index + 8, 440 * run.mfu
        note = f"{run.mfu:.0%}, {run.num_gpus} GPU{'s' * (run.num_gpus > 1)}"
        parts += [
            f'<text x="258" y="{y + 13}" text-anchor="end">{run.model}</text>',
            f'<rect x="266" y="{y}" width="{width:.1f}" height="17" fill="#3b4f8a"/>',
            f'<text x="{272 + width:.1f}" y="{y + 13}">{note}</text>',
        ]
    note = f"share of the dense bf16 peak of {PEAK_TFLOPS:.0f} TFLOP/s, measured on H200s"
    parts.append(f'<text x="266" y="{height - 6}" fill="#555555">{note}</text></svg>')
    return "\n".join(parts) + "\n"


def draw_parts() -> str:
    """Draw what each run's profiled step is made of, as shares of the step."""
    found = {name: read(file).get("split_ms") for name, file in RUNS.items()}
    known = {name: split for name, split in found.items() if split}
    height = 24 * len(known) + 44
    parts = [_head(760, height)]
    for index, (model, split) in enumerate(known.items()):
        y, x = 24 * index + 8, 266.0
        parts.append(f'<text x="258" y="{y + 13}" text-anchor="end">{model}</text>')
        shown = {part: max(0.0, split.get(part, 0.0)) for part in PARTS}
        for part, ms in shown.items():
            width = 480 * ms / sum(shown.values())
            colour = PARTS[part][1]
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="17" fill="{colour}">'
                f"<title>{PARTS[part][0]}: {ms:.0f} ms</title></rect>"
            )
            x += width
    x, y = 20.0, height - 10
    for name, colour in PARTS.values():
        parts.append(f'<rect x="{x:.0f}" y="{y - 10}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15:.0f}" y="{y}">{name}</text>')
        x += 36 + 7.2 * len(name)
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_scaling() -> str:
    """Draw tokens per second of each GPU over those of one, on 1, 2 and 4 GPUs."""
    curves: Mapping[str, Sequence[float]] = dict(scaling_rows())
    parts = [_head(760, 250)]
    for share in (0.9, 1.0, 1.1):
        y = 190 - 850 * (share - 0.9)
        parts.append(f'<path d="M60 {y:.0f}H420" stroke="#dddddd"/>')
        parts.append(f'<text x="52" y="{y + 4:.0f}" text-anchor="end">{share:.0%}</text>')
    for gpus, x in ((1, 60), (2, 240), (4, 420)):
        parts.append(f'<text x="{x}" y="214" text-anchor="middle">{gpus}</text>')
    parts.append('<text x="240" y="236" text-anchor="middle">GPUs of one host</text>')
    colours = [colour for _, colour in PARTS.values()]
    for index, (name, rates) in enumerate(curves.items()):
        points = [
            (x, 190 - 850 * (rate / rates[0] - 0.9))
            for x, rate in zip((60, 240, 420), rates, strict=True)
        ]
        path = " ".join(f"{x},{y:.1f}" for x, y in points)
        line = f'fill="none" stroke="{colours[index]}" stroke-width="2"'
        parts.append(f'<polyline points="{path}" {line}/>')
        model, _, rest = name.partition(", ")
        top = 40 + 44 * index
        parts.append(
            f'<rect x="450" y="{top - 8}" width="12" height="4" fill="{colours[index]}"/>'
        )
        parts.append(f'<text x="468" y="{top}">{model}</text>')
        parts.append(f'<text x="468" y="{top + 16}" fill="#555555">{rest}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _head(width: int, height: int) -> str:
    size = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    )


PICTURES = {
    PICTURE: draw,
    PARTS_PICTURE: draw_parts,
    SCALING_PICTURE: draw_scaling,
    PEERS_PICTURE: partial(performance_peers.draw, read, _head),
}


if __name__ == "__main__":
    PAGE.write_text(render())
    for path, picture in PICTURES.items():
        path.write_text(picture())
