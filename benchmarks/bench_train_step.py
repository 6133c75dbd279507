"""Time and profile the training step of any ``mcore-train`` run, on random tokens.

    torchrun --nproc-per-node 2 benchmarks/bench_train_step.py --name llama-8b-8-layers \
        -- --recipe recipes/model/llama-3-8b.toml --num-layers 8 --bf16 --mock-data ...

Everything after ``--`` is flags of ``mcore-train gpt``, or of the command that ``--program``
names, whose batches then are those of ``--mock-data``. Weights are drawn on the device, which
takes a fraction of the usual time; ``--peft-base-bits`` rounds them, and the peak is that of
the steps. Rank 0 prints one JSON line and writes it to ``--output``: median step with p10 and
p90, tokens/s/GPU, model TFLOP/s, peak memory, the planner's figure for it, and the split of a
profiled step by kind of kernel.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from unittest.mock import patch

import torch
from reporting import add_options, keep, quantiles, time_steps, versions

from mcore_models.counting import build_report, parse_count
from mcore_models.flops import flops_per_token
from mcore_models.kernels import flash4_attention
from mcore_models.protocol import MicroBatch
from mcore_parallel.launch import launcher
from mcore_parallel.random_tiles import hash_words
from mcore_train.assembly import Run, assemble
from mcore_train.batches.micro_batches import train_batches
from mcore_train.checkpoints.adapter_bases import quantize_weights
from mcore_train.composition import FAMILY_COMMANDS
from mcore_train.options.parsing import parse
from mcore_train.reporting.kernel_split import device_kernels, heaviest, split_ms
from mcore_train.resolution import resolve
from mcore_train.running import joined_world
from mcore_train.step import train_step


def main() -> None:
    """Run the benchmark by the command line."""
    own, _, flags = _partition(sys.argv[1:])
    options = _options(own)
    command = FAMILY_COMMANDS[options.program]
    config = parse(flags, f"mcore-train {options.program}", command.run, command.beginning)
    plan = resolve(config, launcher.read_environment().world_size, family=command.family)
    with joined_world(plan) as ctx:
        with patch("mcore_parallel.rng.plan_fills", device_fills):
            run = assemble(plan, ctx)
        quantize_weights(run)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if command.family.dataset == "gpt":
            batches = [random_batches(run) for _ in range(4)]
        else:
            batches = list(islice(train_batches(run), 4))

        def step(i: int) -> None:
            train_step(run, batches[i % 4], 1e-5, 0.01)

        with run.recorder or nullcontext():
            times = time_steps(step, options.warmup, options.steps)
            split, kernels = {}, []
            if options.profiled_steps:
                split, kernels = profile_steps(step, options.profiled_steps)
        if ctx.global_rank == 0:
            report(options, flags, run, times, split)
            print("\n".join(kernels), file=sys.stderr)


def _partition(argv: list[str]) -> tuple[list[str], str, list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], "--", argv[at + 1 :]


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--program", choices=FAMILY_COMMANDS, default="gpt")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--profiled-steps", type=int, default=2, help="1 for large models, or 0: none"
    )
    add_options(parser)
    return parser.parse_args(argv)


def random_batches(run: Run) -> list[MicroBatch]:
    """Draw one step's micro-batches of random tokens on this rank's device."""
    config, plan, ctx = run.plan.config, run.plan, run.ctx
    shape = (config.batch.micro_batch_size, config.batch.seq_length // ctx.cp.size)

    def draw() -> torch.Tensor:
        return torch.randint(0, plan.vocab_size, shape, device=ctx.device)

    def batch() -> MicroBatch:
        drawn = {"tokens": draw(), "labels": draw()}
        mask = torch.ones(shape, device=ctx.device)
        return MicroBatch(run.chunks[0].prepare({**drawn, "loss_mask": mask}))

    return [batch() for _ in range(plan.num_microbatches)]


def profile_steps(step: Callable[[int], object], steps: int) -> tuple[dict, list[str]]:
    """Split some steps by kind of kernel; the wall time is between the first and the last."""
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


def device_fills(
    view: torch.Tensor,
    *,
    seed: int,
    name: str,
    offsets: tuple[int, ...],
    std: float,
    **_: object,
) -> list[Callable[[object], None]]:
    """Draw a weight by the device's generator, in the thread that is told to fill it."""

    def fill(_: object) -> None:
        generator = torch.Generator(view.device).manual_seed(hash_words(seed, name, *offsets))
        view.normal_(std=std, generator=generator)
        torch.cuda.synchronize(view.device)  # a new thread's own device is the first

    return [fill]


def chosen_flags(run: Run) -> list[str]:
    """Return the flags that a run chose on its GPU (``--moe-wgrad-micro-batches``)."""
    chosen = run.plan.expert_wgrads
    return ["--moe-wgrad-micro-batches", str(chosen.num_together)] if chosen else []


def planned_gib(program: str, flags: list[str], world_size: int) -> float:
    """Return what ``mcore-models count`` says of the fullest rank."""
    config, _ = parse_count([program, *flags, "--nproc", str(world_size)])
    return float(build_report(config)["rank_total_gib"])


def report(
    options: argparse.Namespace, flags: list[str], run: Run, times: list[float], split: dict
) -> None:
    """Print the result as one JSON line and keep it if a folder is given."""
    plan, chosen = run.plan, chosen_flags(run)
    tokens_per_s = plan.tokens_per_step / statistics.median(times) * 1e3 / plan.world_size
    model = plan.config.model
    # With adapters most weights have no gradient, which the formula counts.
    has_formula = options.program in ("gpt", "mamba") and plan.config.peft.peft == "none"
    flops = (
        flops_per_token(
            model,
            seq_length=plan.config.batch.seq_length,
            padded_vocab_size=plan.padded_vocab_size,
            moe=plan.config.experts,
        )
        if has_formula
        else math.nan
    )
    row = {
        "name": options.name,
        **versions(options),
        "flash_attn_4": flash4_attention.is_installed(),
        "flags": " ".join(flags),
        "num_gpus": plan.world_size,
        "warmup": options.warmup,
        "steps": options.steps,
        "micro_batches": plan.num_microbatches,
        **quantiles(times, "step_ms", 2),
        "tokens_per_s_per_gpu": round(tokens_per_s, 1),
        **({"tflops_per_gpu": round(tokens_per_s * flops / 1e12, 1)} if has_formula else {}),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "chosen": " ".join(chosen),
        "planned_gib": round(planned_gib(options.program, flags + chosen, plan.world_size), 2),
        "split_ms": split,
    }
    keep(options, row)


if __name__ == "__main__":
    main()
