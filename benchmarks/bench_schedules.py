"""Time pipeline schedules and put the simulator's prediction beside each.

    torchrun --nproc-per-node 4 benchmarks/bench_schedules.py --name llama-3-8b-pp4-h200 \
        --schedules 1f1b interleaved zb-h1 zb-v dualpipev -- \
        --recipe recipes/model/llama-3-8b.toml --bf16 --mock-data --train-iters 40 --lr 1e-4 \
        --pipeline-model-parallel-size 4 --global-batch-size 16

Everything after ``--`` is flags of ``mcore-train gpt``; the schedules' own flags are added.
The durations of each stage's forward, backward and their halves are measured alone on its
rank and given to the simulator, which has no messages and no host: what is
measured beyond its prediction is their cost. Schedules in pairs (1f1b-beside and others, for
experts) are predicted as if they hid nothing: what is measured below that is hidden. Beside the
peak memory stands the planner's figure. Rank 0 prints a table and one JSON line.
"""

import argparse
import gc
import sys
from unittest.mock import patch

import torch
import torch.distributed as dist
from bench_train_step import device_fills, planned_gib, random_batches
from reporting import add_options, keep, quantiles, time_steps, versions

from mcore_parallel.launch import launcher
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.actions import Action, Kind
from mcore_parallel.pipeline_parallel.config import SCHEDULES, PipelineConfig
from mcore_parallel.pipeline_parallel.runner import StageFunction
from mcore_parallel.pipeline_parallel.schedule import build_schedule
from mcore_parallel.pipeline_parallel.simulator import simulate
from mcore_parallel.pipeline_parallel.weight_queue import make_weights
from mcore_train.assembly import Run, assemble
from mcore_train.losses import count_valid
from mcore_train.options.parsing import parse
from mcore_train.resolution import resolve
from mcore_train.running import joined_world
from mcore_train.step import StepLosses, backward, stage_functions

FLAGS = {
    "1f1b": ["--pipeline-schedule", "1f1b"],
    "interleaved": [
        "--pipeline-schedule",
        "interleaved",
        "--num-virtual-stages-per-pipeline-rank",
        "2",
    ],
    **{name: ["--pipeline-schedule", name] for name in ("zb-h1", "zb-v", "dualpipev")},
}
BESIDE = "--overlap-moe-expert-parallel-comm"
FLAGS |= {f"{n}-beside": [*FLAGS[n], BESIDE] for n in ("1f1b", "interleaved", "dualpipev")}

Durations = dict[int, dict[Kind, float]]
"""Milliseconds of each kind of computation, by chunk of a rank."""


def main() -> None:
    """Run the benchmark by the command line."""
    at = sys.argv.index("--")
    options, flags = _options(sys.argv[1:at]), sys.argv[at + 1 :]
    world_size = launcher.read_environment().world_size
    plans = {
        name: resolve(parse([*flags, *FLAGS[name]]), world_size) for name in options.schedules
    }
    with (
        joined_world(next(iter(plans.values()))) as ctx,
        patch("mcore_parallel.rng.plan_fills", device_fills),
    ):
        rows: dict[str, dict] = {}
        for name, plan in plans.items():
            ends = plan.embedding_stages
            own = ParallelContext.build(ctx.config, ctx.device, embedding_stages=ends)
            rows[name] = measure(assemble(plan, own), options)
            rows[name]["planned_gib"] = round(
                planned_gib("gpt", [*flags, *FLAGS[name]], world_size), 2
            )
            gc.collect()  # the next run needs the memory of this one
            torch.cuda.empty_cache()
            own.destroy()
            if ctx.global_rank == 0:
                report(options, flags, world_size, rows)


def report(
    options: argparse.Namespace, flags: list[str], world_size: int, rows: dict[str, dict]
) -> None:
    """Print what is measured so far, and keep it if a folder is given."""
    for name, row in rows.items():
        print(
            f"{name:12s} {row['ms']:9.2f} ms, predicted {row['predicted_ms']:9.2f}; "
            f"{row['peak_gib']} GiB, planned {row['planned_gib']}"
        )
    row = {"name": options.name, **versions(options), "flags": " ".join(flags)}
    counts = {"warmup": options.warmup, "steps": options.steps}
    keep(options, {**row, "num_gpus": world_size, **counts, "schedules": rows})


def measure(run: Run, options: argparse.Namespace) -> dict:
    """Time forward and backward of a step, and predict it."""
    plan = run.plan
    torch.cuda.reset_peak_memory_stats()
    batches = random_batches(run)
    times = time_steps(lambda _: backward(run, batches), options.warmup, options.steps)
    peak_gib = torch.cuda.max_memory_allocated() / 2**30
    ranks = durations_of_all(run.ctx, stage_durations(run, batches, options))
    predicted = predict(plan.config.pipeline, run.ctx.pp.size, plan.num_microbatches, ranks)
    return {
        **quantiles(times),
        **predicted,
        "measured_over_predicted": round(quantiles(times)["ms"] / predicted["predicted_ms"], 4),
        "micro_batches": plan.num_microbatches,
        "peak_gib": round(peak_gib, 2),
        "stage_ms": {
            f"rank {rank} chunk {chunk}": {kind.value: round(ms, 3) for kind, ms in row.items()}
            for rank, chunks in enumerate(ranks)
            for chunk, row in chunks.items()
        },
    }


def predict(
    pipeline: PipelineConfig, pp: int, num_microbatches: int, ranks: list[Durations]
) -> dict[str, float]:
    """Simulate a schedule with measured durations."""

    def duration(rank: int, action: Action) -> float:
        return ranks[rank][action.chunk][action.kind]

    simulation = simulate(
        build_schedule(pipeline, pp, num_microbatches),
        num_microbatches=num_microbatches,
        num_chunks=pipeline.num_chunks,
        v_shaped=pipeline.v_shaped,
        durations=duration,
    )
    return {
        "predicted_ms": round(simulation.makespan, 3),
        "predicted_bubble": round(simulation.bubble_fraction, 4),
    }


def stage_durations(run: Run, batches: list, options: argparse.Namespace) -> Durations:
    """Time each chunk of this rank alone: no messages, no waiting."""
    last = run.chunks[-1]
    masks = [run.objective.masks(each) for each in batches] if last.stage.has_loss else []
    num_valid = count_valid(masks, run.ctx) if masks else {}
    losses = StepLosses(run.ctx.device, run.loss_names)
    functions = stage_functions(run, batches, num_valid, losses)
    run.data_parallel.zero_grad()
    with run.data_parallel.no_sync():
        return {
            number: chunk_durations(run, batches, number, function, options)
            for number, function in functions.items()
        }


def chunk_durations(
    run: Run,
    batches: list,
    number: int,
    function: StageFunction,
    options: argparse.Namespace,
) -> dict[Kind, float]:
    """Time one chunk's forward, then both, then both with the weights put off."""
    chunk, x = run.chunks[number], None
    if not chunk.stage.has_embedding:
        x = torch.randn(
            run.pipeline.payload_shape(batches, 0, 0), device=run.ctx.device, dtype=run.dtype
        )

    def median(backward: bool, weights: bool = True) -> float:
        def step(_: int) -> None:
            output = function(None if x is None else x.detach().requires_grad_(), 0).output
            if backward:
                torch.autograd.backward(output, torch.ones_like(output))
            works = (
                [] if run.pipeline.weight_queue is None else run.pipeline.weight_queue.take()
            )
            if weights:
                make_weights(works)

        return quantiles(time_steps(step, options.warmup, options.steps))["ms"]

    forward, both = median(False), median(True)
    durations = {Kind.FORWARD: forward, Kind.BACKWARD: both - forward}
    if run.pipeline.weight_queue is not None:
        first = median(True, weights=False)
        durations |= {Kind.BACKWARD_INPUT: first - forward, Kind.BACKWARD_WEIGHT: both - first}
    return durations


def durations_of_all(ctx: ParallelContext, own: Durations) -> list[Durations]:
    """Gather what every pipeline rank measured, in their order."""
    if ctx.pp.size == 1:
        return [own]
    gathered: list[Durations] = [{} for _ in range(ctx.pp.size)]
    dist.all_gather_object(gathered, own, group=ctx.pp.group)
    return gathered


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--schedules", nargs="+", choices=FLAGS, default=SCHEDULES)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    add_options(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
