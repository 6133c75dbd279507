"""Activations in host memory, and weights that travel in fp8: time, memory, equal losses.

    python benchmarks/bench_offload.py --name offload-h200 --output benchmarks/results

One process trains the same few steps of Llama-3-8B's shape in several ways, each from the
same weights and batches: plain, twice, with the activations of all layers but the last in host
memory, fully recomputed, in fp8, and in fp8 with ``--fp8-param-gather``. A way that only moves
numbers must give the losses of the one before it to the last bit, unless a kernel adds in
another order each time, which the second plain run shows.
"""

import argparse
import gc
import json
import sys
import time

import torch
from bench_train_step import planned_gib, random_batches
from reporting import add_options, keep, versions

from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.composition import FAMILY_COMMANDS
from mcore_train.options.parsing import parse
from mcore_train.resolution import resolve
from mcore_train.step import train_step

COMMON = """--recipe recipes/model/llama-3-8b.toml --bf16 --mock-data --train-iters 40 --lr 1e-4
    --global-batch-size 1 --use-distributed-optimizer"""
FP8 = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
STEPS = 4


def main() -> None:
    """Run the benchmark by the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=8192)
    add_options(parser)
    options = parser.parse_args()
    offload = ("--cpu-offloading", "--cpu-offloading-num-layers", str(options.layers - 1))
    ways = {
        "plain": (),
        "plain again": (),
        "offload": offload,
        "recompute": ("--recompute-granularity", "full"),
        "fp8": FP8,
        "fp8, param gather": (*FP8, "--fp8-param-gather"),
    }
    common = [*COMMON.split(), "--num-layers", str(options.layers)]
    common += ["--seq-length", str(options.seq_length)]
    common += ["--max-position-embeddings", str(max(8192, options.seq_length))]
    found: dict[str, dict] = {}
    with torch.cuda.stream(torch.cuda.Stream()):
        for name, flags in ways.items():
            found[name] = train([*common, *flags])
            print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    same = {
        name: found[name]["losses"] == found["plain"]["losses"]
        for name in ("plain again", "offload")
    }
    same |= {
        "fp8, param gather": found["fp8, param gather"]["losses"] == found["fp8"]["losses"],
    }
    keep(
        options,
        {
            "name": options.name,
            **versions(options),
            "flags": " ".join(common),
            "steps": STEPS,
            "ways": found,
            "same_bits": same,
        },
    )


def train(flags: list[str]) -> dict[str, object]:
    """Train some steps in one way; the time is that of the last."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    command = FAMILY_COMMANDS["gpt"]
    config = parse(flags, "mcore-train gpt", command.run, ())
    plan = resolve(config, 1, family=command.family)
    run = assemble(plan, ParallelContext.single("cuda"))
    torch.cuda.synchronize()
    start_s = time.perf_counter() - begin
    torch.manual_seed(1)
    batches = random_batches(run)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    losses = []
    for i in range(STEPS):
        if i == STEPS - 1:
            events[0].record()
        losses.append(train_step(run, batches, 1e-4, 0.01).loss)
    events[1].record()
    torch.cuda.synchronize()
    return {
        "start_s": round(start_s, 1),
        "step_ms": round(events[0].elapsed_time(events[1]), 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "planned_gib": round(planned_gib("gpt", flags, 1), 2),
        "losses": [loss.item() for loss in losses],
    }


if __name__ == "__main__":
    main()
