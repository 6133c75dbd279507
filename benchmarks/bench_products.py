"""Time the matrix products of a dense step as torch makes them and as tuned, in turns.

    python benchmarks/bench_products.py --output benchmarks/results

Shapes are those of Llama-3-8B: the products of a layer with 8192 tokens and of the head with a
chunk of 4096, each forward, for the input's gradient, and for the weight's, which is added to
float32. Prints a table and one JSON line: medians with p10 and p90 of turns of a tenth of a
second under full load, TFLOP/s of both, and what they come to in a step of four micro-batches.
"""

import argparse
from collections.abc import Callable

import torch
from reporting import add_options, keep, quantiles, versions

from mcore_parallel.tuned_products import choices, multiply, plain_product, tuned_products

LAYERS, MICRO_BATCHES, TURN_MS = 32, 4, 100
SHAPES = {
    "qkv": (8192, 6144, 4096),
    "proj": (8192, 4096, 4096),
    "fc1": (8192, 28672, 4096),
    "fc2": (8192, 4096, 14336),
    "head": (4096, 128256, 4096),
}
"""Tokens, output and input features."""


def main() -> None:
    """Run the benchmark that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--turns", type=int, default=8)
    add_options(parser)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows, step_ms = {}, {"torch": 0.0, "tuned": 0.0}
    for name, shape in SHAPES.items():
        count = MICRO_BATCHES * (2 if name == "head" else LAYERS)
        for kind, pair in products(*shape).items():
            times = in_turns(pair, options.turns)
            row = {}
            for which, each in times.items():
                found = quantiles(each, f"{which}_ms", 4)
                rate = 2 * shape[0] * shape[1] * shape[2] / found[f"{which}_ms"] / 1e9
                row |= {**found, f"{which}_tflops": round(rate, 1)}
                step_ms[which] += count * found[f"{which}_ms"]
            rows[f"{name} {kind}"] = {**row, "algorithm": choices()[-1][1]}
            both = f"torch {row['torch_tflops']:6.1f}  tuned {row['tuned_tflops']:6.1f} TFLOP/s"
            print(f"{name + ' ' + kind:12s} {both}  algorithm {choices()[-1][1]}", flush=True)
    total = {name: round(ms, 1) for name, ms in step_ms.items()}
    print(f"an 8B's step: torch {total['torch']} ms, tuned {total['tuned']} ms")
    row = {"name": "products-h200", **versions(options), "turns": options.turns}
    keep(options, {**row, "products": rows, "llama_3_8b_step_ms": total})


def products(tokens: int, out: int, inner: int) -> dict[str, dict[str, Callable[[], object]]]:
    """Make the three products of a linear, each as torch's and as tuned."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, w, dy = random(tokens, inner), random(out, inner), random(tokens, out)
    total = torch.zeros(out, inner, device="cuda")
    factors = {
        "forward": (x, w.t(), torch.empty_like(dy), False),
        "input": (dy, w, torch.empty_like(x), False),
        "weight": (dy.t(), x, total, True),
    }
    return {kind: both(*given) for kind, given in factors.items()}


def both(
    a: torch.Tensor, b: torch.Tensor, result: torch.Tensor, adds: bool
) -> dict[str, Callable[[], object]]:
    """Make calls of one product as torch's and as tuned."""
    return {
        "torch": lambda: plain_product(a, b, result, adds=adds),
        "tuned": lambda: multiply(a, b, out=result, adds=adds),
    }


def in_turns(pair: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Return milliseconds of a call in each turn but the first, which chooses and warms up."""
    times: dict[str, list[float]] = {name: [] for name in pair}
    num_calls = 8
    with tuned_products():
        for turn in range(turns + 1):
            for name, call in pair.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                call()
                begin.record()
                for _ in range(num_calls):
                    call()
                end.record()
                end.synchronize()
                if turn:
                    times[name].append(begin.elapsed_time(end) / num_calls)
            if not turn:
                num_calls = max(2, round(TURN_MS * num_calls / begin.elapsed_time(end)))
    return times


if __name__ == "__main__":
    main()
