r"""What observing a run costs, and whether the waterfall's parts add up to the step.

    python benchmarks/bench_observing.py --output DIR -- observing-gpt2-345m --bf16 ... \
        -- observing-gpt2-345m-graphs --cuda-graph-impl full_iteration --bf16 ...

Each ``--`` begins a case: its name, and flags of ``mcore-train gpt``. The training loop itself
runs in turns: with nothing observed, with the waterfall of every second step, and with that and
the statistics by layer of every second step. The difference over the number of measured steps
is the cost of one; at the default interval of 100 steps it is shared by 100. The last turn
reports every step, so that each waterfall can be held against the report's own clock. With CUDA
graphs, which every turn would have to record first, it is the only turn. Prints one JSON line
a case and writes it to ``--output``.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import torch
from bench_train_step import device_fills
from reporting import add_options, keep, versions
from rich.console import Console

from mcore_parallel.launch import launcher
from mcore_train.assembly import Run, assemble
from mcore_train.composition import FAMILY_COMMANDS
from mcore_train.loop import train
from mcore_train.options.parsing import parse
from mcore_train.reporting.log import METRICS, Reporter, read_metrics
from mcore_train.reporting.loggers.tensorboard import TensorBoardLogger
from mcore_train.reporting.waterfall import AXES, PARTS
from mcore_train.resolution import resolve
from mcore_train.running import joined_world

DEFAULT_INTERVAL = 100
MODES = {"nothing": (0, 0), "waterfall": (2, 0), "everything": (2, 2)}
"""Intervals of waterfall and statistics by layer."""


def main() -> None:
    """Run the benchmark by the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument("--turns", type=int, default=2)
    add_options(parser)
    words = itertools.groupby(sys.argv[1:], lambda word: word == "--")
    own, *cases = [list(group) for is_border, group in words if not is_border]
    options = parser.parse_args(own)
    for name, *flags in cases:
        measure(name, flags, options)


def measure(name: str, flags: Sequence[str], options: argparse.Namespace) -> None:
    """Train one case in turns, and keep what observing it costs and how its parts add up."""
    command = FAMILY_COMMANDS["gpt"]
    total = 3 + (len(MODES) * options.turns + 1) * (options.steps + 1)
    flags = [*flags, "--train-iters", str(total), "--lr", "1e-5"]
    config = parse(flags, "mcore-train gpt", command.run, command.beginning)
    plan = resolve(config, launcher.read_environment().world_size, family=command.family)
    folder = Path(tempfile.mkdtemp())
    with joined_world(plan) as ctx:
        if ctx.device.type == "cuda":
            with patch("mcore_parallel.rng.plan_fills", device_fills):
                run = assemble(plan, ctx)
        else:
            run = assemble(plan, ctx)
        turn(run, folder / "warm", (0, 0), 3, log_interval=1)
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        num_turns = options.turns if config.run.cuda_graph_impl == "none" else 0
        for _ in range(num_turns):
            for mode, intervals in MODES.items():
                times[mode].append(turn(run, folder / mode, intervals, options.steps))
        turn(run, folder / "sums", (1, 0), options.steps, log_interval=1)
        off_ns = 1e9 * timeit.timeit(lambda: ctx.clock.span("x"), number=100_000) / 100_000
    result = {
        "name": name,
        "flags": " ".join(flags),
        **(costs(times, options.steps) if num_turns else {}),
        "span_off_ns": round(off_ns, 1),
        **sums(read_metrics(folder / "sums" / METRICS)),
        **versions(options),
    }
    keep(options, result)


def turn(
    run: Run, folder: Path, intervals: tuple[int, int], steps: int, log_interval: int = 0
) -> float:
    """Train some steps after one untimed step; return milliseconds a step, reports included."""
    waterfall, layers = intervals
    config = run.plan.config
    logging = replace(
        config.logging,
        log_interval=log_interval or 1_000_000,
        waterfall_interval=waterfall,
        layer_statistics_interval=layers,
    )
    observed = replace(run, plan=replace(run.plan, config=replace(config, logging=logging)))
    moments: list[float] = []
    is_all = layers > 0
    with Reporter(
        Console(file=StringIO()),
        metrics_file=folder / METRICS,
        loggers=[TensorBoardLogger(folder / "tensorboard")] if is_all else [],
        with_lines=False,
    ) as reporter:
        until = run.progress.iteration + steps + 1
        train(observed, reporter, until=until, on_report=lambda _: moments.append(time.time()))
    return 1e3 * (moments[-1] - moments[0]) / steps


def costs(times: dict[str, list[float]], steps: int) -> dict[str, object]:
    """Return the step, what one measured step adds, and its share at the default interval."""
    plain = statistics.median(times["nothing"])
    # Of the steps of a turn and the one before them, those from the third on, every second one.
    num_measured = steps // 2
    found: dict[str, object] = {"step_ms": round(plain, 3), "turns_ms": times}
    for name in ("waterfall", "everything"):
        cost_ms = (statistics.median(times[name]) - plain) * steps / num_measured
        found[f"{name}_ms"] = round(cost_ms, 3)
        found[f"{name}_share"] = round(cost_ms / (DEFAULT_INTERVAL * plain), 6)
    return found


def sums(rows: list[dict]) -> dict[str, object]:
    """Compare each waterfall with its own step and with the report of that step."""
    reported = {row["iteration"]: row["step_ms"] for row in rows if row["kind"] == "train"}
    falls = [row for row in rows if row["kind"] == "waterfall"]
    names = [*PARTS, *(f"exposed_{axis}" for axis in AXES)]
    errors = [abs(sum(row[f"{n}_ms"] for n in names) / row["step_ms"] - 1) for row in falls]
    shares = [row["step_ms"] / reported[row["iteration"]] for row in falls]
    kept = [f"{name}_ms" for name in names] + ["communication_share", "utilisation"]
    return {
        "largest_error_of_the_sum": max(errors),
        "recorded_over_reported_step": round(statistics.median(shares), 4),
        "waterfall": {n: round(statistics.median(r[n] for r in falls), 4) for n in kept},
        "gradient_noise": falls[-1]["gradient_noise"],
    }


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
