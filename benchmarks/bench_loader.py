"""Time the loader on one core: tokens handed out in a second, from the page cache.

    python benchmarks/bench_loader.py --tokens 200000000

Writes a .bin/.idx pair of documents of mean 1 000 tokens, reads it once, then times batches
of GPT samples and of a blend of two such datasets, without worker processes. The bound is
the copy: 16-bit tokens read, 64-bit tokens, positions and a loss mask written.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from mcore_data.blending import BlendedDataset
from mcore_data.gpt import GPTDataset
from mcore_data.indexed import IndexedDataset
from mcore_data.indexed_writing import IndexedWriter
from mcore_data.loader import build_loader


def main() -> None:
    """Run the benchmark that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default="", help="of the source that is timed")
    parser.add_argument("--output", default="", help="file to keep the line in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "tokens"
        write_pair(prefix, options.tokens)
        pair = IndexedDataset(prefix)
        single = GPTDataset(pair, sequence_length=options.seq_length)
        other = GPTDataset(pair, sequence_length=options.seq_length, seed=1)
        blend = BlendedDataset([single, other], [0.6, 0.4], len(single))
        row = {
            "benchmark": "loader",
            "tokens": options.tokens,
            "seq_length": options.seq_length,
            "micro_batch_size": options.micro_batch_size,
            "gpt_tokens_per_s": rates(single, options),
            "gpt_pinned_layout_tokens_per_s": rates(single, options, contiguous=True),
            "blend_tokens_per_s": rates(blend, options),
            "numpy": np.__version__,
            "commit": options.commit,
        }
    line = json.dumps(row)
    print(line)
    if options.output:
        Path(options.output).write_text(line + "\n")


def write_pair(prefix: Path, num_tokens: int) -> None:
    """Write documents of 1 to 2 000 tokens of random ids."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 2000, num_tokens // 1000)
    with IndexedWriter(prefix, "uint16") as writer:
        for part in np.array_split(lengths, 20):
            tokens = random.integers(0, 50_000, int(part.sum()), dtype=np.uint16)
            writer.add_documents(tokens, part)


def rates(
    dataset: GPTDataset | BlendedDataset,
    options: argparse.Namespace,
    *,
    contiguous: bool = False,
) -> dict[str, int]:
    """Tokens a second of some passes over the dataset: the worst, the middle, the best."""
    found = []
    for number in range(options.repeats + 1):
        loader = build_loader(dataset, micro_batch_size=options.micro_batch_size)
        begin, tokens = time.perf_counter(), 0
        for batch in itertools.islice(loader, 2000):
            tokens += batch["tokens"].numel()
            if contiguous:
                for value in batch.values():
                    value.contiguous()
        if number:  # the first pass fills the page cache
            found.append(tokens / (time.perf_counter() - begin))
    return {
        "worst": round(min(found)),
        "median": round(statistics.median(found)),
        "best": round(max(found)),
    }


if __name__ == "__main__":
    main()
