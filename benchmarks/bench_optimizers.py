"""Time the step of each optimizer, or compare their losses on real text at equal tokens.

    torchrun --nproc-per-node 1 benchmarks/bench_optimizers.py time --name optimizers-h100 \
        --output benchmarks/results
    python benchmarks/bench_optimizers.py train --name optimizers-curves --folder /tmp/curves \
        --data text.jsonl.gz --minutes 5 --output benchmarks/results

``time`` builds the run of some ``mcore-train gpt`` flags once for each optimizer (8 layers of
Llama-3-8B in bf16 unless flags after ``--`` say otherwise) and times ``optimizer.step`` alone,
on random gradients, and the whole training step. It runs on any number of GPUs, and on a
processor with small flags.

``train`` trains a GPT of about 100 M parameters with each of ``--cases``, side by side over the
host's GPUs on the same batches, and keeps curves and held-out losses. ``--data`` takes JSONL
files; without it, text is gathered as ``bench_fp8_quality.py`` does. With ``--minutes`` as many
steps are made as fit, timed on the first steps of all runs together.
"""

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import torch
from bench_fp8_quality import prepare_text
from bench_train_step import device_fills, random_batches
from reporting import add_options, keep, quantiles, time_steps, versions

from mcore_parallel.launch import launcher
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.options.parsing import parse
from mcore_train.resolution import Plan, resolve
from mcore_train.running import joined_world
from mcore_train.step import train_step

ADAM = "--adam-beta2 0.95 --weight-decay 0.1"
FP8 = "--fp8-format hybrid --fp8-recipe delayed"
MUON = f"--optimizer muon --muon-momentum 0.95 --muon-nesterov {ADAM}"
CASES = {
    "adam": f"--optimizer adam {ADAM}",
    "adam-masked": f"--optimizer adam {ADAM} --spike-policy skip",
    "muon": f"{MUON} --muon-extra-scale-factor 0.2",
    "normuon": f"{MUON} --muon-moment2-method normuon",
    "adamuon": f"{MUON} --muon-moment2-method adamuon",
    "soap": f"--optimizer soap {ADAM}",
    "adam-fp8": f"--optimizer adam {ADAM} {FP8}",
    "muon-fp8": f"{MUON} --muon-extra-scale-factor 0.2 {FP8}",
    "lion": "--optimizer lion --weight-decay 1.0 --lr 1e-4 --min-lr 1e-5",
}
"""Flags of each optimizer; the learning rate is the common one, but Lion's is a tenth. Masked
cases time updates that read from the device whether they are applied, as every step is. The
fp8 cases run the linears' GEMMs in fp8 and are meant for ``train``."""
TIMED = """--recipe recipes/model/llama-3-8b.toml --num-layers 8 --bf16 --mock-data
    --train-iters 60 --lr 1e-4 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather"""
TRAINED = """--bf16 --num-layers 6 --hidden-size 1024 --num-attention-heads 16
    --ffn-hidden-size 2816 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 16 --global-batch-size 32 --lr 1e-3 --min-lr 1e-4
    --lr-decay-style cosine --lr-warmup-fraction 0.05 --log-interval 5"""
"""94 M parameters with 16 384 ids, its embedding the head too; 32 768 tokens a step."""
_PILOT_STEPS = 40


def main() -> None:
    """Run the benchmark by the command line."""
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = _options(sys.argv[1:at])
    options.flags = sys.argv[at + 1 :]
    if options.command == "time":
        time_optimizers(options)
    else:
        compare_losses(options)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    timed = commands.add_parser("time")
    timed.add_argument("--warmup", type=int, default=3)
    timed.add_argument("--steps", type=int, default=10)
    timed.add_argument("--train-steps", type=int, default=3, help="whole steps; 0: none")
    timed.add_argument("--cases", nargs="+", choices=CASES, default=["adam", "muon"])
    trained = commands.add_parser("train")
    trained.add_argument("--folder", type=Path, required=True, help="for tokens and runs")
    trained.add_argument("--data", nargs="*", type=Path, default=[], help="JSONL files")
    trained.add_argument("--minutes", type=float, default=0, help="of everything; 0: no limit")
    trained.add_argument("--mtokens", type=float, default=200, help="millions a run reads")
    trained.add_argument("--cases", nargs="+", choices=CASES, default=["adam", "muon", "soap"])
    trained.add_argument("--seed", type=int, default=1)
    trained.add_argument("--vocab-size", type=int, default=16_384)
    trained.add_argument("--roots", nargs="+", default=[sys.prefix, "/usr", "/opt"])
    trained.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    for each in (timed, trained):
        each.add_argument("--name", required=True)
        add_options(each)
    return parser.parse_args(argv)


def time_optimizers(options: argparse.Namespace) -> None:
    """Time the optimizers one after the other; rank 0 keeps the row."""
    base = [*TIMED.split(), *options.flags]
    world_size = launcher.read_environment().world_size
    plans = {
        case: resolve(parse([*base, *CASES[case].split()], "mcore-train gpt"), world_size)
        for case in options.cases
    }
    with joined_world(next(iter(plans.values()))) as ctx:
        found = {case: time_one(plan, ctx, options) for case, plan in plans.items()}
        if ctx.global_rank:
            return
        first = next(iter(plans.values()))
        row = {
            "name": options.name,
            **versions(options),
            "flags": " ".join(base),
            "world_size": world_size,
            "tokens_per_step": first.global_batch_size * first.config.batch.seq_length,
            "optimizers": found,
        }
        keep(options, row)


def time_one(plan: Plan, ctx: ParallelContext, options: argparse.Namespace) -> dict[str, float]:
    """Time one optimizer's step by itself, and whole steps of training."""
    is_gpu = ctx.device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    with patch("mcore_parallel.rng.plan_fills", device_fills if is_gpu else _fills()):
        run = assemble(plan, ctx)
    engine = run.data_parallel
    engine.zero_grad()
    engine.finish()
    for unit in engine.units:
        unit.own_grads().normal_(std=1e-3)

    has_policy = plan.config.spikes.spike_policy != "none"
    is_applied = torch.tensor(True, device=ctx.device) if has_policy else None

    def update(_: int) -> None:
        run.optimizer.step(1e-5, 0.1, is_applied=is_applied)

    clock = time_steps if is_gpu else _time_on_processor
    times = clock(update, options.warmup, options.steps)
    found = quantiles(times, "optimizer_ms")
    if options.train_steps:
        engine.wait_params()
        batches = random_batches(run)
        whole = clock(lambda _: train_step(run, batches, 1e-5, 0.1), 1, options.train_steps)
        found |= quantiles(whole, "step_ms")
        found["share"] = round(found["optimizer_ms"] / found["step_ms"], 4)
    if is_gpu:
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    engine.remove_hooks()
    del run, engine
    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()
    return found


def _fills() -> object:
    """Return the usual way to draw weights, for a processor."""
    from mcore_parallel import rng

    return rng.plan_fills


def _time_on_processor(step: object, warmup: int, steps: int) -> list[float]:
    assert callable(step)
    times = []
    for i in range(warmup + steps):
        begin = time.perf_counter()
        step(i)
        times.append(1e3 * (time.perf_counter() - begin))
    return times[warmup:]


def compare_losses(options: argparse.Namespace) -> None:
    """Train all cases side by side and keep their curves."""
    begin = time.perf_counter()
    options.folder.mkdir(parents=True, exist_ok=True)
    flags = [*TRAINED.split(), *options.flags]
    last = {name: flags[i + 1] for i, name in enumerate(flags[:-1])}
    tokens_per_step = int(last["--global-batch-size"]) * int(last["--seq-length"])
    facts = tokenize(options) if options.data else prepare_text(options)
    steps = max(1, int(options.mtokens * 1e6) // tokens_per_step)
    if options.minutes:
        with ThreadPoolExecutor(len(options.cases)) as pool:
            pilots = list(
                pool.map(
                    lambda case: train(options, flags, case, _PILOT_STEPS, "pilot"),
                    options.cases,
                )
            )
        start_s = max(pilot["start_s"] for pilot in pilots)
        step_s = max(pilot["step_ms"] for pilot in pilots) / 1e3
        left_s = 60 * options.minutes - (time.perf_counter() - begin) - start_s
        steps = max(1, min(steps, int(0.9 * left_s / step_s)))
    print(f"{steps} steps of {options.cases}; text: {facts}", file=sys.stderr)
    with ThreadPoolExecutor(len(options.cases)) as pool:
        runs = list(
            pool.map(lambda case: train(options, flags, case, steps, "run"), options.cases)
        )
    row = {
        "name": options.name,
        **versions(options),
        "flags": " ".join(flags),
        "text": facts,
        "steps": steps,
        "tokens_per_step": tokens_per_step,
        "tokens": steps * tokens_per_step,
        "valid_loss": {run["case"]: run["valid_loss"] for run in runs},
        "valid_perplexity": {
            run["case"]: round(math.exp(run["valid_loss"]), 3) for run in runs
        },
        "step_ms_side_by_side": {run["case"]: run["step_ms"] for run in runs},
        "runs": runs,
    }
    keep(options, row)


def tokenize(options: argparse.Namespace) -> dict[str, object]:
    """Train a byte-level BPE on the given files and tokenize them; what is there stays."""
    folder = options.folder
    data = [sys.executable, "-m", "mcore_data"]
    files = [str(path.resolve()) for path in options.data]
    tokenizer = folder / "tokenizer"
    manifest = folder / "tokens_text_document.manifest.json"
    if not manifest.exists():
        call = [*data, "train-tokenizer", "--input", *files, "--output", str(tokenizer)]
        _check_run([*call, "--vocab-size", str(options.vocab_size)], folder / "tokenizer.log")
        call = [*data, "preprocess", "--input", *files, "--tokenizer-model", str(tokenizer)]
        call += ["--output-prefix", str(folder / "tokens"), "--append-eod", "--verify", "off"]
        _check_run([*call, "--workers", str(options.workers)], folder / "preprocess.log")
    found = json.loads(manifest.read_text())
    names = [path.name for path in options.data]
    return {"files": names, "documents": found["documents"], "tokens": found["tokens"]}


def train(
    options: argparse.Namespace, flags: Sequence[str], case: str, steps: int, kind: str
) -> dict:
    """Train one case to its end, or return what was kept of it; curves are (step, loss)."""
    folder = options.folder
    kept = folder / f"{kind}-{case}-{options.seed}-{steps}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    metrics = kept.with_suffix(".jsonl")
    metrics.unlink(missing_ok=True)
    words = ["--data-path", str(folder / "tokens_text_document"), "--split", "98,2,0"]
    words += ["--tokenizer-model", str(folder / "tokenizer"), "--train-iters", str(steps)]
    words += ["--seed", str(options.seed), "--metrics-file", str(metrics)]
    if kind == "run":
        words += ["--eval-interval", str(max(1, steps // 5)), "--eval-iters", "10"]
    call = [sys.executable, "-m", "mcore_train", "gpt", *flags, *CASES[case].split(), *words]
    begin = time.perf_counter()
    gpu = options.cases.index(case) % max(1, torch.cuda.device_count())
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    _check_run(call, metrics.with_suffix(".log"), environment)
    elapsed_s = time.perf_counter() - begin
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in lines if row["kind"] == "train"]
    step_ms = statistics.median(row["step_ms"] for row in rows[1:] or rows)
    valid = [
        [row["iteration"], round(row["loss"], 5)] for row in lines if row["kind"] == "valid"
    ]
    run = {
        "case": case,
        "flags": CASES[case],
        "step_ms": round(step_ms, 2),
        "start_s": round(elapsed_s - steps * step_ms / 1e3, 1),
        "valid_loss": valid[-1][1] if valid else None,
        "valid_curve": valid,
        "curve": [[row["iteration"], round(row["loss"], 5)] for row in rows],
    }
    kept.write_text(json.dumps(run))
    return run


def _check_run(
    call: Sequence[str], log: Path, environment: dict[str, str] | None = None
) -> None:
    with log.open("w") as out:
        done = subprocess.run(
            call, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(call)}\nfailed:\n{log.read_text()[-3000:]}")


if __name__ == "__main__":
    main()
