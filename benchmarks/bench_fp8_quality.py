"""Train one small GPT on real text in bf16 and in fp8, and compare their losses.

    python benchmarks/bench_fp8_quality.py --name fp8-quality-h200 --folder /tmp/quality \
        --output benchmarks/results --mtokens 200 --seeds 1 2 3

Text comes from the sources and documents of installed packages (``--roots``), each content
once, in an order drawn by content; a byte-level BPE is trained on a part of it. Every run is
``mcore-train gpt`` with its own seed of weights and data order; flags after ``--`` are added
to all. Cases of one seed see the same batches, so their losses are compared step by step.
``bf16-b`` is bf16 again with another Adam epsilon in the third digit: how far two runs drift
apart whose arithmetic differs in the last bits alone.

A run that is finished is kept in ``--folder`` and not done again, and ``--runs`` takes those
of earlier results in. ``--seconds`` first times all runs side by side for some steps, while
the text is prepared, and trains as many steps as fit.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path

from reporting import add_options, keep, versions

CASES = {
    "bf16": (),
    "bf16-b": ("--adam-eps", "1.01e-8"),
    "delayed": ("--fp8-format", "hybrid", "--fp8-recipe", "delayed"),
    "tensorwise": ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    "rowwise": ("--fp8-format", "e4m3", "--fp8-recipe", "rowwise"),
    "blockwise": ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise"),
}
MODEL = """--bf16 --num-layers 6 --hidden-size 1024 --num-attention-heads 16
    --ffn-hidden-size 2816 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 16 --global-batch-size 16 --lr 1e-3 --min-lr 1e-4
    --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95
    --cuda-graph-impl full_iteration --log-interval 5"""
"""94 M parameters with 16 384 ids, its embedding the head too; 16 384 tokens a step."""
_ENDINGS = (".py", ".pyi", ".h", ".hpp", ".cuh", ".c", ".cpp", ".cu", ".md", ".rst", ".txt")
_ENDINGS += (".html", ".js", ".json", ".pm", ".pl", ".cmake", ".toml", ".yaml", ".yml")
_BYTES_PER_TOKEN = 4.2
_SAMPLE_BYTES = 20_000_000
_PILOT_STEPS = 300
"""So many that the runs, which do not begin at once, overlap for most of them."""
_BLOCKS = 10


def main() -> None:
    """Run the benchmark by the command line."""
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = _options(sys.argv[1:at])
    options.flags = [*MODEL.split(), *sys.argv[at + 1 :]]
    options.folder.mkdir(parents=True, exist_ok=True)
    wanted = [(case, seed) for seed in options.seeds for case in options.cases]
    begin = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        text = pool.submit(prepare_text, options)
        tokens = options.mtokens * 1_000_000
        steps = options.steps or tokens // _tokens_per_step(options.flags)
        if options.seconds:
            step_s, start_s = time_side_by_side(options, wanted)
        facts = text.result()
    if options.seconds:
        left_s = options.seconds - (time.perf_counter() - begin) - start_s
        steps = min(steps, int(0.96 * left_s / step_s))
    print(f"{steps} steps of each of {len(wanted)} runs; text: {facts}", file=sys.stderr)
    with ThreadPoolExecutor(options.at_once or len(wanted)) as pool:
        runs = list(pool.map(lambda run: train(options, run[0], run[1], steps), wanted))
    earlier = [json.loads(path.read_text())["runs"] for path in options.runs]
    runs = [*chain.from_iterable(earlier), *runs]
    others = [case for case in CASES if case != "bf16"]
    compared = {case: compare(runs, case) for case in others}
    row = {
        "name": options.name,
        **versions(options),
        "flags": " ".join(options.flags),
        "text": facts,
        "tokens_per_step": _tokens_per_step(options.flags),
        "compared": {case: found for case, found in compared.items() if found},
        "runs": runs,
    }
    keep(options, row)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for text, tokens, runs")
    parser.add_argument("--mtokens", type=int, default=200, help="millions that a run reads")
    parser.add_argument("--steps", type=int, default=0, help="0: as --mtokens says")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["bf16", "delayed"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--at-once", type=int, default=0, help="runs side by side; 0: all")
    parser.add_argument("--seconds", type=float, default=0, help="of everything; 0: no limit")
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help="earlier results")
    parser.add_argument("--roots", nargs="+", default=[sys.prefix, "/usr", "/opt"])
    parser.add_argument("--vocab-size", type=int, default=16_384)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    add_options(parser)
    return parser.parse_args(argv)


def _tokens_per_step(flags: Sequence[str]) -> int:
    last = {name: flags[i + 1] for i, name in enumerate(flags[:-1])}
    return int(last["--global-batch-size"]) * int(last["--seq-length"])


def prepare_text(options: argparse.Namespace) -> dict[str, float]:
    """Gather, train a tokenizer, tokenize; what is there already stays."""
    folder, begin = options.folder, time.perf_counter()
    kept = folder / "text.json"
    if kept.exists():
        return json.loads(kept.read_text())
    parts = gather(options.roots, folder, options.mtokens * 1e6 * _BYTES_PER_TOKEN, options)
    gathered_s = time.perf_counter() - begin
    sample = folder / "sample.jsonl"
    with sample.open("w", encoding="utf-8") as out:
        for part in parts:
            with part.open(encoding="utf-8") as lines:
                out.writelines(_until(lines, _SAMPLE_BYTES // len(parts)))
    data = [sys.executable, "-m", "mcore_data"]
    tokenizer = str(folder / "tokenizer")
    call = [*data, "train-tokenizer", "--input", str(sample), "--output", tokenizer]
    _check_run([*call, "--vocab-size", str(options.vocab_size)], folder / "tokenizer.log")
    trained_s = time.perf_counter() - begin
    call = [*data, "preprocess", "--input", *map(str, parts), "--tokenizer-model", tokenizer]
    call += ["--output-prefix", str(folder / "tokens"), "--append-eod", "--verify", "off"]
    _check_run([*call, "--workers", str(options.workers)], folder / "preprocess.log")
    manifest = json.loads((folder / "tokens_text_document.manifest.json").read_text())
    facts = {
        "megabytes": round(sum(part.stat().st_size for part in parts) / 1e6, 1),
        "documents": manifest["documents"],
        "mtokens": round(manifest["tokens"] / 1e6, 2),
        "gather_s": round(gathered_s, 1),
        "train_tokenizer_s": round(trained_s - gathered_s, 1),
        "preprocess_s": round(time.perf_counter() - begin - trained_s, 1),
    }
    kept.write_text(json.dumps(facts))
    return facts


def _until(lines: Iterable[str], most: int) -> Iterable[str]:
    for line in lines:
        yield line
        most -= len(line)
        if most < 0:
            return


def gather(
    roots: Sequence[str], folder: Path, wanted_bytes: float, options: argparse.Namespace
) -> list[Path]:
    """Write texts of at most so many bytes as JSON lines, one file a worker, in drawn order."""
    paths = sorted({path for root in roots for path in _text_files(root)})
    with ThreadPoolExecutor(options.workers) as pool:
        found = pool.map(_digest, paths)
        by_digest = {digest: (path, size) for digest, path, size in found if digest}
        chosen, total = [], 0
        for _, (path, size) in sorted(by_digest.items()):
            if total > wanted_bytes:
                break
            chosen.append(path)
            total += size
        parts = [folder / f"text-{i:03d}.jsonl" for i in range(options.workers)]
        shares = [chosen[i :: options.workers] for i in range(options.workers)]
        list(pool.map(_write, parts, shares))
    return parts


def _text_files(root: str) -> Iterable[str]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith(_ENDINGS) and not os.path.islink(path):
                yield path


def _digest(path: str) -> tuple[str, str, int]:
    """Return a digest of the content with path and size; an empty one: no text for us."""
    try:
        content = Path(path).read_bytes()
        content.decode()
    except (UnicodeDecodeError, OSError):
        return "", path, 0
    if not 200 <= len(content) <= 400_000:
        return "", path, 0
    return hashlib.blake2b(content, digest_size=16).hexdigest(), path, len(content)


def _write(part: Path, paths: Sequence[str]) -> None:
    with part.open("w", encoding="utf-8") as out:
        for path in paths:
            text = Path(path).read_text(encoding="utf-8")
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def _check_run(call: Sequence[str], log: Path) -> None:
    with log.open("w") as out:
        done = subprocess.run(call, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(call)}\nfailed:\n{log.read_text()[-3000:]}")


def time_side_by_side(
    options: argparse.Namespace, wanted: Sequence[tuple[str, int]]
) -> tuple[float, float]:
    """Return the seconds of the slowest step and of the slowest start, on made-up tokens."""
    mock = ["--mock-data", "--mock-vocab-size", str(options.vocab_size)]
    mock += ["--train-iters", str(_PILOT_STEPS)]

    def pilot(run: tuple[str, int]) -> tuple[float, float]:
        case, seed = run
        metrics = options.folder / f"pilot-{case}-{seed}.jsonl"
        metrics.unlink(missing_ok=True)
        begin = time.perf_counter()
        flags = [*mock, *CASES[case], "--seed", str(seed), "--metrics-file", str(metrics)]
        call = [sys.executable, "-m", "mcore_train", "gpt", *options.flags, *flags]
        _check_run(call, metrics.with_suffix(".log"))
        elapsed_s = time.perf_counter() - begin
        times = sorted(row["step_ms"] / 1e3 for row in _train_rows(metrics)[4:])
        mean_s = statistics.mean(times)
        # Beside the others: not the first steps of one, nor the last of another.
        return times[len(times) * 3 // 4], max(0.0, elapsed_s - _PILOT_STEPS * mean_s)

    with ThreadPoolExecutor(options.at_once or len(wanted)) as pool:
        times = list(pool.map(pilot, wanted))
    return max(step_s for step_s, _ in times), max(start_s for _, start_s in times)


def train(options: argparse.Namespace, case: str, seed: int, steps: int) -> dict[str, object]:
    """Train one run to its end, or return what it gave when it was done before."""
    folder = options.folder
    kept = folder / f"run-{case}-{seed}-{steps}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    metrics = kept.with_suffix(".jsonl")
    metrics.unlink(missing_ok=True)
    flags = ["--data-path", str(folder / "tokens_text_document"), "--split", "98,2,0"]
    flags += ["--tokenizer-model", str(folder / "tokenizer"), "--train-iters", str(steps)]
    flags += ["--eval-interval", str(steps), "--eval-iters", "20", "--seed", str(seed)]
    flags += ["--metrics-file", str(metrics), *CASES[case]]
    call = [sys.executable, "-m", "mcore_train", "gpt", *options.flags, *flags]
    _check_run(call, metrics.with_suffix(".log"))
    rows = _train_rows(metrics)
    valid = [row["loss"] for row in _rows(metrics) if row["kind"] == "valid"]
    run = {
        "case": case,
        "seed": seed,
        "steps": steps,
        "step_ms": round(statistics.median(row["step_ms"] for row in rows), 2),
        "valid_loss": round(valid[-1], 5),
        "curve": [[row["iteration"], round(row["loss"], 5)] for row in rows],
    }
    kept.write_text(json.dumps(run))
    return run


def _rows(metrics: Path) -> list[dict]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def _train_rows(metrics: Path) -> list[dict]:
    return [row for row in _rows(metrics) if row["kind"] == "train"]


def compare(runs: Sequence[Mapping], case: str) -> dict[str, object]:
    """Compare a case's losses of the last tenth with bf16's, paired by seed and step.

    The standard error of one pair is that of the mean of ten consecutive blocks of differences,
    since neighbouring steps drift together. That of the mean over seeds comes from those of the
    pairs, and where there are three pairs or more also from how the pairs differ: the larger.
    """
    by_key = {(run["case"], run["seed"], run["steps"]): run for run in runs}
    pairs = []
    for (name, seed, steps), run in sorted(by_key.items()):
        plain = by_key.get(("bf16", seed, steps))
        if name != case or plain is None:
            continue
        last = zip(run["curve"], plain["curve"], strict=True)
        differences = [a - b for (step, a), (_, b) in last if step > 0.9 * steps]
        mean, error = block_error(differences, _BLOCKS)
        valid = run["valid_loss"] - plain["valid_loss"]
        pairs.append(
            {"seed": seed, "steps": steps, "difference": mean, "standard_error": error}
        )
        pairs[-1]["valid_difference"] = valid
    if not pairs:
        return {}
    means = [pair["difference"] for pair in pairs]
    error = math.hypot(*(pair["standard_error"] for pair in pairs)) / len(pairs)
    if len(pairs) > 2:
        error = max(error, statistics.stdev(means) / math.sqrt(len(means)))
    found = {"pairs": len(pairs), "difference": statistics.mean(means), "standard_error": error}
    found["is_within_two_standard_errors"] = abs(found["difference"]) <= 2 * error
    valid = statistics.mean(pair["valid_difference"] for pair in pairs)
    return _rounded({**found, "valid_difference": valid, "by_seed": pairs})


def block_error(values: Sequence[float], blocks: int) -> tuple[float, float]:
    """Return the mean and its standard error from means of consecutive blocks."""
    blocks = min(blocks, len(values))
    edges = [i * len(values) // blocks for i in range(blocks + 1)]
    means = [statistics.mean(values[a:b]) for a, b in pairwise(edges)]
    error = statistics.stdev(means) / math.sqrt(blocks) if blocks > 1 else math.inf
    return statistics.mean(values), error


def _rounded(value: object) -> object:
    match value:
        case bool():
            return value
        case float():
            return round(value, 6)
        case dict():
            return {key: _rounded(each) for key, each in value.items()}
        case list():
            return [_rounded(each) for each in value]
    return value


if __name__ == "__main__":
    main()
