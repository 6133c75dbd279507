"""Time the building of sample and blend indices on one core.

    python benchmarks/bench_index.py --documents 20000000 --mean-length 1000

Prints one JSON line: tokens indexed in a second (lengths, both shuffles and the cut into
samples of one epoch), and samples of a blend laid out in a second. The tokens themselves
are never read, so the bound is the memory's answer to the shuffle's random accesses.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mcore_data.blending import blend_by_weight
from mcore_data.sample_index import SampleIndexSpec, build_sample_index


def main() -> None:
    """Run the benchmark that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=20_000_000)
    parser.add_argument("--mean-length", type=int, default=1000)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--blend-samples", type=int, default=10_000_000)
    parser.add_argument("--blend-datasets", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", default="", help="of the source that is timed")
    parser.add_argument("--output", default="", help="file to keep the line in")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    lengths = random.integers(1, 2 * options.mean_length, options.documents, dtype=np.int32)
    spec = SampleIndexSpec(sequence_length=options.seq_length)
    index_s = measure(
        lambda: build_sample_index(lengths, range(len(lengths)), spec), options.repeats
    )
    weights = random.random(options.blend_datasets)
    blend_s = measure(lambda: blend_by_weight(weights, options.blend_samples), options.repeats)
    tokens = int(lengths.sum(dtype=np.int64))
    row = {
        "benchmark": "index",
        "documents": options.documents,
        "tokens": tokens,
        "seq_length": options.seq_length,
        "index_s": index_s,
        "index_tokens_per_s": round(tokens / index_s["median"]),
        "blend_samples": options.blend_samples,
        "blend_datasets": options.blend_datasets,
        "blend_s": blend_s,
        "blend_samples_per_s": round(options.blend_samples / blend_s["median"]),
        "processor": platform.processor() or platform.machine(),
        "numpy": np.__version__,
        "commit": options.commit,
    }
    line = json.dumps(row)
    print(line)
    if options.output:
        Path(options.output).write_text(line + "\n")


def measure(function: Callable[[], object], repeats: int) -> dict[str, float]:
    """Wall-clock seconds of some calls: the best, the middle and the worst."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return {"best": min(times), "median": statistics.median(times), "worst": max(times)}


if __name__ == "__main__":
    main()
