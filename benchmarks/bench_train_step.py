"""Time and profile the training step of any ``mcore-train gpt`` run, on random tokens.

    torchrun --nproc-per-node 2 benchmarks/bench_train_step.py --name llama-8b-8-layers \
        -- --recipe recipes/model/llama-3-8b.toml --num-layers 8 --bf16 --mock-data ...

Everything after ``--`` is flags of ``mcore-train gpt``. Rank 0 prints one JSON line and
writes it to ``--output``: median step with p10 and p90, tokens/s/GPU, model TFLOP/s, peak
memory, and the split of a profiled step by kind of kernel.
"""

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from step_profile import device_kernels, heaviest, split_ms

from mcore_models.flops import flops_per_token
from mcore_parallel import launching
from mcore_train.assembly import Run, assemble
from mcore_train.losses import MicroBatch
from mcore_train.parsing import parse
from mcore_train.resolution import resolve
from mcore_train.running import joined_world
from mcore_train.step import train_step


def main() -> None:
    """Run the benchmark that the command line asks for."""
    own, _, flags = _partition(sys.argv[1:])
    options = _options(own)
    plan = resolve(parse(flags), launching.read_environment().world_size)
    with joined_world(plan) as ctx:
        run = assemble(plan, ctx)
        batches = [random_batches(run) for _ in range(4)]
        times = time_steps(
            lambda i: train_step(run, batches[i % 4], 1e-5, 0.01), options.warmup, options.steps
        )
        split, kernels = profile_steps(lambda i: train_step(run, batches[i % 4], 1e-5, 0.01))
        if ctx.global_rank == 0:
            report(options, flags, run, times, split)
            print("\n".join(kernels), file=sys.stderr)


def _partition(argv: list[str]) -> tuple[list[str], str, list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], "--", argv[at + 1 :]


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=None, help="folder for NAME.json")
    parser.add_argument("--commit", default="", help="where there is no git")
    return parser.parse_args(argv)


def random_batches(run: Run) -> list[MicroBatch]:
    """Draw one step's micro-batches of random tokens on this rank's device."""
    config, plan, ctx = run.plan.config, run.plan, run.ctx
    shape = (config.batch.micro_batch_size, config.batch.seq_length // ctx.cp.size)

    def draw() -> torch.Tensor:
        return torch.randint(0, plan.vocab_size, shape, device=ctx.device)

    return [
        MicroBatch(
            tokens=draw(),
            labels=draw(),
            loss_mask=torch.ones(shape, device=ctx.device),
            positions=None,
        )
        for _ in range(plan.num_microbatches)
    ]


def time_steps(step: Callable[[int], object], warmup: int, steps: int) -> list[float]:
    """Return the milliseconds of each step by device events, after a warm-up."""
    for i in range(warmup):
        step(i)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for i in range(steps):
        step(i)
        events[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def profile_steps(step: Callable[[int], object], steps: int = 2) -> tuple[dict, list[str]]:
    """Split two steps by kind of kernel; the wall time is between the steps' first and last."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda.synchronize()
        begin.record()
        for i in range(steps):
            step(i)
        end.record()
        torch.cuda.synchronize()
    kernels = device_kernels(profile)
    wall_us = 1e3 * begin.elapsed_time(end)
    return split_ms(kernels, wall_us, steps), heaviest(kernels, steps)


def report(
    options: argparse.Namespace, flags: list[str], run: Run, times: list[float], split: dict
) -> None:
    """Print the result as one JSON line and keep it if a folder is given."""
    plan = run.plan
    ordered = sorted(times)
    step_ms = statistics.median(ordered)
    tokens_per_s = plan.tokens_per_step / step_ms * 1e3 / plan.world_size
    flops = flops_per_token(
        plan.config.model,
        seq_length=plan.config.batch.seq_length,
        padded_vocab_size=plan.padded_vocab_size,
        moe=plan.config.experts,
    )
    row = {
        "name": options.name,
        "commit": options.commit or commit(),
        "flags": " ".join(flags),
        "device": torch.cuda.get_device_name(),
        "num_gpus": plan.world_size,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "warmup": options.warmup,
        "steps": options.steps,
        "micro_batches": plan.num_microbatches,
        "step_ms": round(step_ms, 2),
        "step_ms_p10": round(ordered[len(ordered) // 10], 2),
        "step_ms_p90": round(ordered[-1 - len(ordered) // 10], 2),
        "tokens_per_s_per_gpu": round(tokens_per_s, 1),
        "tflops_per_gpu": round(tokens_per_s * flops / 1e12, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "split_ms": split,
    }
    print(json.dumps(row))
    if options.output:
        path = options.output / f"{options.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=1) + "\n")


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
