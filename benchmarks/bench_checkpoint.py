"""Measure what saving costs a training run: stall of each step, bandwidth of load and reshard.

    torchrun --nproc-per-node 4 benchmarks/bench_checkpoint.py --name llama-8b \
        --folder /tmp/run -- --recipe recipes/model/llama-3-8b.toml --bf16 --mock-data \
        --use-distributed-optimizer --recompute-granularity full --lr 1e-5 --train-iters 1

Everything after ``--`` is flags of ``mcore-train gpt``. Steps run on random tokens as
``mcore-train`` runs them with ``--async-save``. A step's stall is its time above the median of
the steps during which nothing was saved; the first save, which pins the host memory, is a row
apart. Each save is durable before the next is requested. Then rank files are read plainly, for
comparison, and the step is loaded. Rank 0 prints a JSON line after each save and round, and a
table in the end; ``--output`` always holds what is known so far.
"""

import argparse
import itertools
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_train_step import random_batches
from reporting import add_options, keep, spread, versions

from mcore_ckpt.conversion.resharding import reshard
from mcore_ckpt.save_load.loading import load
from mcore_ckpt.storage.paths import complete_steps, resolve_folder
from mcore_parallel.collectives import all_reduce
from mcore_parallel.launch import launcher
from mcore_train.assembly import Run, assemble
from mcore_train.batches.datasets import Datasets
from mcore_train.checkpoints.checkpointing import Checkpoints
from mcore_train.checkpoints.resuming import save_run, take_snapshot
from mcore_train.guards.gc_control import GCControl
from mcore_train.options.parsing import parse
from mcore_train.reporting.log import Reporter
from mcore_train.resolution import resolve
from mcore_train.running import joined_world
from mcore_train.step import train_step


class Clock:
    """Times of steps, by device events where there is a device: nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list = []

    def mark(self) -> None:
        """Note the end of a step."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def step_ms(self) -> list[float]:
        """Return the time between the marks that the device has come to."""
        if not self._on_gpu:
            return [1e3 * (b - a) for a, b in itertools.pairwise(self._marks)]
        reached = itertools.takewhile(torch.cuda.Event.query, self._marks)
        return [a.elapsed_time(b) for a, b in itertools.pairwise(reached)]


class Calls(Reporter):
    """Keeps the records that a run makes of its saves."""

    def __init__(self) -> None:
        super().__init__(None)
        self.stall_ms: list[float] = []
        self.durable_s: list[float] = []

    def record(self, kind, _iteration, numbers):
        """Keep a record."""
        if kind == "save_requested":
            self.stall_ms.append(numbers["stall_ms"])
        elif kind == "save_durable":
            self.durable_s.append(numbers["after_s"])


def main() -> None:
    """Run the benchmark by the command line."""
    at = sys.argv.index("--")
    options, flags = _options(sys.argv[1:at]), sys.argv[at + 1 :]
    flags += ["--save", str(options.folder), "--async-save", "--save-retain-last", "1"]
    plan = resolve(parse(flags), launcher.read_environment().world_size)
    with joined_world(plan) as ctx:
        run = assemble(plan, ctx, datasets=Datasets())
        row: dict[str, object] = {
            "name": options.name,
            **versions(options),
            "flags": " ".join(flags),
            "num_ranks": plan.world_size,
        }

        def tell(results: dict) -> None:
            row.update(results)
            if ctx.global_rank == 0:
                keep(options, row)

        if options.saves:
            training(run, options, tell)
        else:
            tell({"plain_save_s": round(timed(run, lambda: save_run(run)), 1)})
        bandwidths(run, options, tell)
        if ctx.global_rank == 0:
            for key, value in row.items():
                print(f"{key:28} {value}")
            shutil.rmtree(options.folder, ignore_errors=True)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="run folder; is deleted")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--quiet-steps", type=int, default=25, help="before the first save")
    parser.add_argument(
        "--saves", type=int, default=5, help="beside the first; 0: no steps, one plain save"
    )
    parser.add_argument("--steps-per-save", type=int, default=20, help="at least")
    parser.add_argument("--reshard-gib", type=float, default=4.0, help="0: leave it out")
    parser.add_argument("--rounds", type=int, default=3, help="of each bandwidth, in turns")
    add_options(parser)
    return parser.parse_args(argv)


def training(run: Run, options: argparse.Namespace, tell: Callable[[dict], None]) -> None:
    """Step through quiet steps and saves; report the stalls after each save."""
    batches = [random_batches(run) for _ in range(4)]
    calls, clock = Calls(), Clock(run.ctx.device)
    under_way: list[bool] = []

    collector = GCControl(run.plan.config.run.manual_gc_interval)  # as the training loop's

    with collector, Checkpoints(run, calls) as checkpoints:

        def step() -> None:
            under_way.append(checkpoints.is_saving)
            train_step(run, batches[run.progress.iteration % 4], 1e-5, 0.01, checkpoints.hold)
            run.progress.iteration += 1
            checkpoints.poll()
            collector.after_step(run.progress.iteration)
            clock.mark()

        def save(steps: int) -> None:
            checkpoints.save()
            for _ in range(steps):
                step()
            while checkpoints.is_saving:
                step()
            if len(calls.durable_s) < len(calls.stall_ms):
                raise RuntimeError("a save came to nothing: the log says why.")

        for _ in range(options.warmup):
            step()
        save(0)
        begin = len(under_way)
        for _ in range(options.quiet_steps):
            step()
        first = len(under_way)
        for number in range(1, options.saves + 1):
            save(options.steps_per_save)
            if number == options.saves and run.ctx.device.type == "cuda":
                torch.cuda.synchronize()
            # Step i lies between marks i - 1 and i; a save's call is part of the step after it.
            times = clock.step_ms()[begin - 1 :]
            tell(
                {
                    "saves": number,
                    **stalls(times, under_way[begin:], first - begin),
                    "save_call_ms": [round(ms, 2) for ms in calls.stall_ms[1:]],
                    "first_save_call_ms": round(calls.stall_ms[0], 1),
                    "durable_after_s": [round(s, 1) for s in calls.durable_s],
                    "host_gib_per_rank": round(checkpoints.host_bytes / 2**30, 2),
                }
            )


def stalls(times: list[float], under_way: list[bool], first: int) -> dict:
    """Return what saves cost the steps from ``first`` on: those before saw none.

    Args:
        times: milliseconds of each step; the last may be missing.
        under_way: whether a save was, when the step began.
        first: number of steps before the first measured save.
    """
    steps = list(zip(times, under_way, strict=False))
    quiet = sorted(ms for ms, is_busy in steps if not is_busy)
    writing = sorted(ms for ms, is_busy in steps if is_busy)
    median = statistics.median(quiet)
    above = sorted(max(0.0, ms - median) for ms, _ in steps[first:])
    return {
        "steps": len(above),
        "writing_steps": len(writing),
        "quiet_step_ms": round(median, 2),
        "quiet_step_ms_p99": round(_percentile(quiet, 0.99), 2),
        "writing_step_ms": round(statistics.mean(writing), 2),
        "writing_over_quiet_mean": round(statistics.mean(writing) / statistics.mean(quiet), 4),
        "stall_ms_p50": round(_percentile(above, 0.5), 2),
        "stall_ms_p99": round(_percentile(above, 0.99), 2),
        "stall_ms_max": round(above[-1], 2),
    }


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bandwidths(run: Run, options: argparse.Namespace, tell: Callable[[dict], None]) -> None:
    """Compare loading and resharding with plain reads and copies; report after each round."""
    step = resolve_folder(options.folder, complete_steps(options.folder)[-1])
    mine = step / f"rank_{run.ctx.global_rank:05d}.safetensors"
    total = sum(file.stat().st_size for file in step.glob("*.safetensors"))
    size = mine.stat().st_size if mine.exists() else 0
    shards = take_snapshot(run).shards
    rates: dict[str, list[float]] = {"plain_read": [], "load": [], "load_again": []}
    for _ in range(options.rounds):  # in turns: disks have moods
        works: dict[str, Callable[[], object]] = {
            "plain_read": lambda: read_plainly(mine),
            "load": lambda: load(step, shards, world=run.ctx.world),
            "load_again": lambda: load(step, shards, world=run.ctx.world),
        }
        for name, work in works.items():
            if name != "load_again":
                forget(mine)
            rates[name].append(total / timed(run, work) / 1e9)
        row = {"checkpoint_gib": round(total / 2**30, 2)}
        for name, each in rates.items():
            row |= spread(each, f"{name}_gb_per_s", 2)
        tell(row)
    del shards
    if run.ctx.global_rank == 0 and size and options.reshard_gib:
        rewriting(options, tell)
    timed(run, lambda: None)


def rewriting(options: argparse.Namespace, tell: Callable[[dict], None]) -> None:
    """Reshard a checkpoint of ``--reshard-gib``, and copy as many bytes; on one rank."""
    from mcore_ckpt.save_load.saving import save
    from mcore_parallel import SINGLE
    from mcore_parallel.sharding import Piece, Shard

    rows = 4096
    count = max(1, int(options.reshard_gib * 2**30) // (4 * rows * rows))
    parts = 8
    weight = torch.randn(rows, rows)
    pieces = tuple(
        Piece((i * rows // parts, 0), (rows // parts, rows), part)
        for i, part in enumerate(weight.chunk(parts))
    )
    shards = {f"w{i}": Shard((rows, rows), weight.dtype, pieces) for i in range(count)}
    folder = options.folder.with_name(options.folder.name + "_reshard")
    try:
        step = save(folder / "a", 1, shards, world=SINGLE)
        (file,) = step.glob("*.safetensors")
        size = file.stat().st_size
        copies, reshards = [], []
        for number in range(options.rounds):
            forget(file)
            begin = time.perf_counter()
            with file.open("rb") as one, (folder / "copy").open("wb") as two:
                shutil.copyfileobj(one, two, 1 << 24)
                two.flush()
                os.fsync(two.fileno())
            copies.append(size / (time.perf_counter() - begin) / 1e9)
            forget(file)
            begin = time.perf_counter()
            reshard(step, folder / f"b{number}", num_files=2)
            reshards.append(size / (time.perf_counter() - begin) / 1e9)
            shutil.rmtree(folder / f"b{number}")
            tell(
                {
                    **spread(copies, "copy_gb_per_s", 2),
                    **spread(reshards, "reshard_gb_per_s", 2),
                }
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def timed(run: Run, work) -> float:
    """Run on all ranks; return the seconds of the slowest."""
    all_reduce(torch.zeros(1, device=run.ctx.device), run.ctx.world).item()
    begin = time.perf_counter()
    work()
    if run.ctx.device.type == "cuda":
        torch.cuda.synchronize()
    mine = torch.tensor([time.perf_counter() - begin], device=run.ctx.device)
    return all_reduce(mine, run.ctx.world, "max").item()


def read_plainly(path: Path) -> None:
    """Read a file from its beginning to its end."""
    if path.exists():
        room = bytearray(1 << 24)
        with path.open("rb", buffering=0) as file:
            while file.readinto(room):
                pass


def forget(path: Path) -> None:
    """Ask the system to drop a file's pages, so that it comes from the disk."""
    if path.exists():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
