"""The page of measured performance, from files of benchmarks/results.

``uv run python tests/docs/performance_page.py`` writes docs/performance.md and its picture.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.sources import ROOT

PAGE = ROOT / "docs/performance.md"
PICTURE = ROOT / "docs/performance.svg"
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


def render() -> str:
    """Write the page."""
    lines = [
        "# Measured performance",
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
        "## Scaling on one host",
        "",
        "| work | 1 GPU, tokens/s | 2 GPUs, of each | 4 GPUs, of each | 4 GPUs over 1 |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {rates[0]:,.0f} | {rates[1]:,.0f} | {rates[2]:,.0f} "
        f"| {rates[2] / rates[0]:.1%} |"
        for name, rates in scaling_rows()
    ]
    return "\n".join(lines) + "\n"


def draw() -> str:
    """Draw the share of the peak of each run as bars."""
    runs = measured_runs()
    height = 24 * len(runs) + 30
    font = 'font-family="sans-serif" font-size="13"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" {font}>',
        f'<rect width="760" height="{height}" fill="#ffffff"/>',
    ]
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


if __name__ == "__main__":
    PAGE.write_text(render())
    PICTURE.write_text(draw())
