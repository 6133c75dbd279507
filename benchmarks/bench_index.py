"""Time the building of sample and blend indices on one core.

    python benchmarks/bench_index.py --documents 20000000 --mean-length 1000

Tokens indexed in a second (lengths, both shuffles and the cut into samples of one epoch),
and samples of a blend laid out in a second. The tokens themselves are never read: the bound
is numpy's own shuffle of as many documents and samples, one after the other, which the
order asks for, and which is timed alone beside it.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
from reporting import add_options, host_versions, keep, spread

from mcore_data.datasets.blending import blend_by_weight
from mcore_data.datasets.sample_index import SampleIndexSpec, build_sample_index


def main() -> None:
    """Run the benchmark by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=20_000_000)
    parser.add_argument("--mean-length", type=int, default=1000)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--blend-samples", type=int, default=10_000_000)
    parser.add_argument("--blend-datasets", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="index")
    add_options(parser)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    lengths = random.integers(1, 2 * options.mean_length, options.documents, dtype=np.int32)
    spec = SampleIndexSpec(sequence_length=options.seq_length)
    tokens = int(lengths.sum(dtype=np.int64))
    weights = random.random(options.blend_datasets)
    deck = np.arange(options.documents)
    samples = np.arange((tokens - 1) // options.seq_length, dtype=np.uint32)

    def shuffles() -> None:
        legacy = np.random.RandomState(spec.seed)
        legacy.shuffle(deck)
        legacy.shuffle(samples)

    index_s = measure(
        lambda: build_sample_index(lengths, range(len(lengths)), spec), options.repeats
    )
    shuffles_s = measure(shuffles, options.repeats)
    blend_s = measure(lambda: blend_by_weight(weights, options.blend_samples), options.repeats)
    keep(
        options,
        {
            "name": options.name,
            **host_versions(options),
            "documents": options.documents,
            "tokens": tokens,
            "seq_length": options.seq_length,
            "repeats": options.repeats,
            **spread(index_s, "index_s"),
            **spread([tokens / s / 1e9 for s in index_s], "index_gtokens_per_s"),
            **spread(shuffles_s, "numpy_shuffles_alone_s"),
            "bound_gtokens_per_s": round(tokens / min(shuffles_s) / 1e9, 3),
            "blend_samples": options.blend_samples,
            "blend_datasets": options.blend_datasets,
            **spread(blend_s, "blend_s"),
            **spread(
                [options.blend_samples / s / 1e6 for s in blend_s], "blend_msamples_per_s"
            ),
        },
    )


def measure(function: Callable[[], object], repeats: int) -> list[float]:
    """Wall-clock seconds of each of some calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()
