"""The same steps of one model in several ways, in one process: time, memory, equal losses.

    python benchmarks/bench_ways.py --name offload-h200 --output benchmarks/results \
        --way plain --way 'offload: --cpu-offloading --cpu-offloading-num-layers 3' \
        -- --recipe recipes/model/llama-3-8b.toml --num-layers 4 --bf16 --mock-data ...

Everything after ``--`` is flags of ``mcore-train gpt``, and a way adds those after its colon.
Each begins from the same weights, drawn on the device in a fraction of the usual time, and
reads the same batches; ``same_losses_as`` names the first way before it whose losses have the
same bits. A way that fails, for want of memory say, is kept with its error, and the next one
begins; so is one that the packages warn of, as where Transformer Engine is not installed or
linears stay out of fp8: its times would be those of something else than it says. Started by
``torchrun``, all ways have the layout of the flags after ``--``.
"""

import argparse
import gc
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from bench_train_step import (
    chosen_flags,
    device_fills,
    planned_gib,
    profile_steps,
    random_batches,
)
from reporting import add_options, keep, quantiles, time_steps, versions

from mcore_models.flops import flops_per_token
from mcore_models.kernels import flash4_attention
from mcore_parallel.launch import launcher
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import Run, assemble
from mcore_train.composition import FAMILY_COMMANDS
from mcore_train.options.parsing import parse
from mcore_train.resolution import Plan, resolve
from mcore_train.running import joined_world
from mcore_train.step import train_step


def main() -> None:
    """Run the benchmark by the command line."""
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, common = _options(sys.argv[1:at]), sys.argv[at + 1 :]
    ways = dict(_named(way) for way in options.way)
    found: dict[str, dict] = {}
    result = {
        "name": options.name,
        **versions(options),
        "flash_attn_4": flash4_attention.is_installed(),
        "flags": " ".join(common),
        "num_gpus": launcher.read_environment().world_size,
        "warmup": options.warmup,
        "steps": options.steps,
    }
    with (
        joined_world(_plan(common)) as ctx,
        torch.cuda.stream(torch.cuda.Stream()),
        patch("mcore_parallel.rng.plan_fills", device_fills),
    ):
        for name, flags in ways.items():
            try:
                with warnings_raised():
                    row = train([*common, *flags], ctx, options)
            except (RuntimeError, ValueError) as error:  # a benchmark keeps what failed
                row = {"error": f"{type(error).__name__}: {error}"[:600]}
            same = (other for other in found if _same_losses(found[other], row))
            found[name] = {"flags": " ".join(flags), **row, "same_losses_as": next(same, "")}
            if ctx.global_rank == 0:  # at once: a later way may run out of time
                keep(options, {**result, "ways": found})
            gc.collect()
            torch.cuda.empty_cache()


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--way", action="append", required=True, help="NAME: FLAGS")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--profiled-steps", type=int, default=0)
    add_options(parser)
    return parser.parse_args(argv)


def _named(way: str) -> tuple[str, list[str]]:
    name, _, flags = way.partition(":")
    return name, flags.split()


def _plan(flags: list[str]) -> Plan:
    command = FAMILY_COMMANDS["gpt"]
    config = parse(flags, "mcore-train gpt", command.run, ())
    return resolve(config, launcher.read_environment().world_size, family=command.family)


def _same_losses(one: dict, other: dict) -> bool:
    return "losses" in one and one["losses"] == other.get("losses")


@contextmanager
def warnings_raised() -> Iterator[None]:
    """Raise what the packages log as a warning: another way computes than the one named."""

    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name.startswith("mcore_"):
                raise RuntimeError(record.getMessage())

    handler = Raising(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def train(
    flags: list[str], ctx: ParallelContext, options: argparse.Namespace
) -> dict[str, object]:
    """Train some steps in one way."""
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    plan = _plan(flags)
    run = assemble(plan, ctx)
    torch.cuda.synchronize()
    start_s = time.perf_counter() - begin
    losses: list[torch.Tensor] = []
    torch.manual_seed(1)
    batches = [random_batches(run) for _ in range(4)]

    def step(i: int) -> None:
        losses.append(train_step(run, batches[i % 4], 1e-4, 0.01).loss.clone())

    with run.recorder or nullcontext():
        times = time_steps(step, options.warmup, options.steps)
        split = {}
        if options.profiled_steps:
            split, _ = profile_steps(step, options.profiled_steps)
    chosen = chosen_flags(run)
    return {
        "start_s": round(start_s, 1),
        **quantiles(times, "step_ms", 2),
        **_rates(run, times),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "chosen": " ".join(chosen),
        "planned_gib": round(planned_gib("gpt", flags + chosen, plan.world_size), 2),
        **({"split_ms": split} if split else {}),
        "losses": [loss.item() for loss in losses],
    }


def _rates(run: Run, times: list[float]) -> dict[str, float]:
    config, plan = run.plan.config, run.plan
    tokens_per_s = plan.tokens_per_step / quantiles(times)["ms"] * 1e3 / plan.world_size
    flops = flops_per_token(
        config.model,
        seq_length=config.batch.seq_length,
        padded_vocab_size=plan.padded_vocab_size,
        moe=config.experts,
    )
    return {
        "tokens_per_s_per_gpu": round(tokens_per_s, 1),
        "tflops_per_gpu": round(tokens_per_s * flops / 1e12, 1),
    }


if __name__ == "__main__":
    main()
