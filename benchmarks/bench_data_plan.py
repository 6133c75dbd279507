"""Time a plan under local, Slurm or Ray workers that are killed, and compare its digest.

    python benchmarks/bench_data_plan.py --documents 2000000 --executor local

Writes generated text, tokenizes it on one machine, then as a plan with ``--workers`` workers,
``--kills`` of which are killed at random times, and joins the units. The tokens and the index
of both must be equal byte for byte, or the program fails. Prints one JSON line. Slurm needs a
cluster (``SLURM_CONF``), Ray the extra ``ray``. Everything is below ``--folder``, which is
removed. With ``--keep`` the text and the result of one machine stay there, and the next
executor is compared with them.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from reporting import add_options, host_versions, keep

from mcore_data.config import LaunchConfig
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.preprocessing.executors import run_ray
from mcore_data.preprocessing.work_plan import read_plan

WORDS = ("time", "of", "the", "light", "and", "water", "house", "seven", "under", "green", "is")


def main() -> None:
    """Run one executor and print its times."""
    options = _options()
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=options.keep)
    try:
        row = measure(options, folder)
    finally:
        if not options.keep:
            shutil.rmtree(folder)
    keep(options, row)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Return the times of one machine and of the plan; fails if their bytes differ."""
    corpus, tokenizer, of_one_machine = (
        folder / name for name in ("corpus.jsonl", "tokenizer", "one-machine.json")
    )
    job = ["--input", corpus, "--tokenizer-model", tokenizer, "--append-eod"]
    if not of_one_machine.exists():
        write_corpus(corpus, options.documents, options.most_words)
        sample = folder / "sample.jsonl"
        with corpus.open() as file:
            sample.write_text("".join(itertools.islice(file, 2000)))
        _run("train-tokenizer", "--input", sample, "--output", tokenizer, "--vocab-size", 2000)
        began = time.monotonic()
        _run("preprocess", *job, "--output-prefix", folder / "whole")
        seconds = round(time.monotonic() - began, 1)
        facts = {"single_s": seconds, "sha256": digest(folder / "whole_text_document")}
        of_one_machine.write_text(json.dumps(facts))
    whole = json.loads(of_one_machine.read_text())
    unit = corpus.stat().st_size // options.units + 1
    prefix = folder / options.executor
    _run("plan", *job, "--output-prefix", prefix, "--unit-size", f"{unit}B")
    plan = Path(f"{prefix}.plan.json")
    words = ["--plan", plan, "--executor", options.executor, "--num-tasks", options.workers]
    words += ["--max-retries", options.kills + 3]
    words += ["--submit-jobs", "--wait"] * (options.executor == "slurm")
    killed: list[float] = []
    stop = threading.Event()
    killer = threading.Thread(target=kill_workers, args=(options, plan, killed, stop))
    began = time.monotonic()
    killer.start()
    try:
        if options.executor == "ray":
            _run_ray(options, plan)
        else:
            _run("launch", *words)
    finally:
        stop.set()
        killer.join()
    plan_s = time.monotonic() - began
    began = time.monotonic()
    _run("merge", "--plan", plan)
    merge_s = time.monotonic() - began
    joined = Path(f"{prefix}_text_document")
    sha256 = digest(joined)
    if sha256 != whole["sha256"]:
        raise SystemExit(f"the plan's bytes differ: {whole['sha256']} and {sha256}")
    dataset = IndexedDataset(joined)
    units = Path(f"{prefix}.units")
    num_units = len(list(units.glob("*.bin")))
    shutil.rmtree(units)
    return {
        "name": f"data-plan-{options.executor}",
        "executor": options.executor,
        "documents": dataset.num_documents,
        "tokens": dataset.num_tokens,
        "input_bytes": corpus.stat().st_size,
        "units": num_units,
        "workers": options.workers,
        "killed": len(killed),
        "single_s": whole["single_s"],
        "plan_s": round(plan_s, 1),
        "merge_s": round(merge_s, 2),
        "sha256": sha256,
        **host_versions(options),
    }


def write_corpus(path: Path, num_documents: int, most_words: int) -> None:
    """Write documents of 5 to ``most_words`` random words, each with its number."""
    draw = random.Random(7)
    texts = [
        " ".join(draw.choices(WORDS, k=draw.randrange(5, most_words + 1))) for _ in range(10007)
    ]
    with path.open("w") as file:
        for number, text in zip(range(num_documents), itertools.cycle(texts), strict=False):
            file.write(f'{{"text": "{number}: {text}."}}\n')


def kill_workers(
    options: argparse.Namespace, plan: Path, killed: list[float], stop: threading.Event
) -> None:
    """Kill a worker of the plan at random times, ``options.kills`` times."""
    draw = random.Random(options.seed)
    while len(killed) < options.kills and not stop.wait(draw.uniform(1, options.kill_every_s)):
        workers = _workers(plan)
        if workers:
            os.kill(draw.choice(workers), signal.SIGKILL)
            killed.append(time.monotonic())


def digest(prefix: Path) -> str:
    """SHA-256 of a dataset's tokens and index."""
    found = hashlib.sha256()
    for tokens in IndexedDataset(prefix).chunks():
        found.update(tokens.tobytes())
    found.update(Path(f"{prefix}.idx").read_bytes())
    return found.hexdigest()


def _workers(plan: Path) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            continue
        of_plan = b"preprocess" in words and str(plan).encode() in words
        if of_plan or words[0].startswith(b"ray::_write_unit"):
            found.append(int(process.name))
    return found


def _run(*words: object) -> None:
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mcore_data", *map(str, words)],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _run_ray(options: argparse.Namespace, plan: Path) -> None:
    import ray  # pyrefly: ignore[missing-import]

    # Over loopback, which a sandbox without a network has too.
    workers = options.workers
    ray.init("local", num_cpus=workers, _node_ip_address="127.0.0.1", log_to_driver=False)
    config = LaunchConfig(executor="ray", num_tasks=workers, max_retries=options.kills + 3)
    run_ray(read_plan(plan), config)
    ray.shutdown()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--most-words", type=int, default=39)
    parser.add_argument("--executor", choices=("local", "slurm", "ray"), default="local")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--units", type=int, default=40)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--kill-every-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default="/tmp/bench-data-plan")
    parser.add_argument("--keep", action="store_true")
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
