"""Seconds from a launch to the first step of training, and to the first token of a server.

    python benchmarks/bench_start.py [--geometry llama-3-8b] [--cases train serve] -- GPT-FLAGS

Each case starts twice in new processes: the first start compiles what the host has not compiled
before, the second finds it. A model of random weights is saved to be served (BENCH_TMP: where),
and read from a warm page cache. Parts of a training start are those that its log names.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_decode import GEOMETRIES, build
from bench_server import served, stream
from reporting import add_options, keep, versions

from mcore_ckpt.save_load.saving import save
from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_models.description import ModelDescription
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import named_shards

STARTS = ("first_start", "second_start")


def main() -> None:
    """Run the cases; print and keep one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--name", default="start")
    parser.add_argument("--geometry", default="llama-3-8b", choices=list(GEOMETRIES))
    parser.add_argument("--cases", nargs="+", default=["train", "serve"])
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    row = {"name": options.name, **versions(options), "geometry": options.geometry}
    row["flags"] = " ".join(options.flags)
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_TMP")) as folder:
        if "train" in options.cases:
            row["train"] = {
                start: time_training(Path(folder) / start, options.flags) for start in STARTS
            }
            print(row["train"], file=sys.stderr, flush=True)
        if "serve" in options.cases:
            run = Path(folder) / "served"
            save_random(run, options.geometry)
            row["serve"] = {start: time_serving(run) for start in STARTS}
    keep(options, row)


def time_training(run: Path, flags: list[str]) -> dict[str, object]:
    """Train two steps; seconds from the launch until the first has ended, and their parts."""
    command = [sys.executable, "-m", "mcore_train", "gpt", *flags, "--mock-data", "--lr=1e-4"]
    command += ["--train-iters=2", "--log-interval=1", "--no-save-optim", f"--save={run}"]
    began_s = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if row["kind"] == "train")
    parts = next(row["start_s"] for row in rows if row["kind"] == "run")
    return {"to_first_step_s": round(first["time"] - began_s, 2), **parts}


def time_serving(run: Path) -> dict[str, float]:
    """Start a server; seconds from the launch until it listens, and to a request's token."""
    began_s = time.perf_counter()
    with served(run, ranks=1, clients=1) as port:
        listening_s = time.perf_counter() - began_s
        stream(port, 9, 1)  # a number that leaves after the first event
        token_s = time.perf_counter() - began_s
    return {"to_listening_s": round(listening_s, 2), "to_first_token_s": round(token_s, 2)}


def save_random(run: Path, geometry: str) -> None:
    """Save a model of random weights with a tokenizer of bytes, in a process's own memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(geometry, ParallelContext.single(device))
    description = ModelDescription(config=model.config, vocab_size=model.vocab_size)
    shards = {f"model.{name}": shard for name, shard in named_shards(model).items()}
    tokenizer = run.with_suffix(".tokenizer")
    ByteTokenizer().save(tokenizer)
    extra = {"model": description.to_dict()}
    save(run, 1, shards, world=SINGLE, extra=extra, folders={"tokenizer": tokenizer})
    del model, shards
    if device == "cuda":
        torch.cuda.empty_cache()  # the server needs the memory


if __name__ == "__main__":
    main()
