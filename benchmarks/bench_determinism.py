"""What ``--deterministic-mode`` costs, and that it keeps its word: one table, one JSON line.

    python benchmarks/bench_determinism.py --name determinism-h200 --output benchmarks/results

Each case is trained three times with ``mcore-train gpt`` on made-up tokens: once as fast as
it goes, twice deterministically. The two must write the same losses, norms and checkpoint
files, to the last byte.
"""

import argparse
import hashlib
import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

COMMON = (
    "--mock-data --vocab-size 32000 --num-workers 0 --lr 1e-4 --bf16 --log-interval 1 "
    "--hidden-size 2048 --num-attention-heads 16 --num-query-groups 4 --seq-length 4096 "
    "--global-batch-size 4"
)
CASES = {
    "dense": "--num-layers 8",
    "dense recomputed": "--num-layers 8 --recompute-granularity full",
    "dense window": "--num-layers 8 --window-size 1023 0",
    "experts": "--num-layers 4 --num-experts 8 --moe-ffn-hidden-size 2048 "
    "--moe-aux-loss-coeff 1e-2",
}
PARALLEL = {
    "zero dp2": "--num-layers 8 --nproc 2 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather",
    "tp2 sp": "--num-layers 8 --nproc 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "experts ep2": "--num-layers 4 --nproc 2 --num-experts 8 --moe-ffn-hidden-size 2048 "
    "--moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 2",
}


def main() -> None:
    """Run all cases that this host has GPUs for."""
    options = _options()
    cases = CASES | (PARALLEL if torch.cuda.device_count() > 1 else {})
    rows = []
    for name, flags in cases.items():
        if options.cases and name not in options.cases:
            continue
        with tempfile.TemporaryDirectory(prefix="determinism") as folder:
            runs = [
                train(flags, options.steps, Path(folder) / mode, deterministic=mode != "fast")
                for mode in ("fast", "first", "second")
            ]
        (fast_ms, _), (first_ms, first), (second_ms, second) = runs
        own_ms = min(first_ms, second_ms)
        row = {
            "case": name,
            "fast_ms": round(fast_ms, 2),
            "deterministic_ms": round(own_ms, 2),
            "cost": round(own_ms / fast_ms - 1, 4),
            "same_bits": first == second,
        }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    report(options, rows)
    sys.exit(not all(row["same_bits"] for row in rows))


def train(flags: str, steps: int, folder: Path, *, deterministic: bool) -> tuple[float, str]:
    """Train; return the median step in milliseconds and a hash of all that was written."""
    mode = "--deterministic-mode" if deterministic else ""
    words = f"{COMMON} {flags} {mode} --train-iters {steps} --save {folder}"
    command = [sys.executable, "-m", "mcore_train", "gpt", *shlex.split(words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    lines = [json.loads(s) for s in (folder / "metrics.jsonl").read_text().splitlines()]
    steps_ms = [line["step_ms"] for line in lines if "step_ms" in line]
    digest = hashlib.sha256()
    for line in lines:
        digest.update(repr((line.get("loss"), line.get("grad_norm"))).encode())
    for file in sorted(folder.glob("iter_*/*.safetensors")):
        digest.update(file.read_bytes())
    return statistics.median(steps_ms[len(steps_ms) // 3 :]), digest.hexdigest()


def report(options: argparse.Namespace, rows: list[dict]) -> None:
    """Print the table and the JSON line, and write the latter."""
    print(f"{'case':20} {'fast ms':>9} {'determ. ms':>11} {'cost':>7}  same bits")
    for row in rows:
        print(
            f"{row['case']:20} {row['fast_ms']:9.2f} {row['deterministic_ms']:11.2f} "
            f"{row['cost']:7.1%}  {row['same_bits']}"
        )
    result = {
        "name": options.name,
        "commit": options.commit,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "common": COMMON,
        "steps": options.steps,
        "rows": rows,
    }
    print(json.dumps(result))
    if options.output:
        Path(options.output, f"{options.name}.json").write_text(json.dumps(result) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", default="determinism")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cases", nargs="+", default=[], help="only these rows")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
