"""Time the loader on one core: tokens handed out in a second, from the page cache.

    python benchmarks/bench_loader.py --tokens 200000000

Writes a .bin/.idx pair of documents of mean 1 000 tokens, reads it once, then times batches
of GPT samples and of a blend of two such datasets, without worker processes. The bound is
the copy: 16-bit tokens read, 64-bit tokens, positions and a loss mask written.
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from reporting import add_options, host_versions, keep, spread

from mcore_data.datasets.blending import BlendedDataset
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter
from mcore_data.loading.loader import build_loader


def main() -> None:
    """Run the benchmark by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="loader")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "tokens"
        write_pair(prefix, options.tokens)
        pair = IndexedDataset(prefix)
        single = GPTDataset(pair, sequence_length=options.seq_length)
        other = GPTDataset(pair, sequence_length=options.seq_length, seed=1)
        blend = BlendedDataset([single, other], [0.6, 0.4], len(single))
        row = {
            "name": options.name,
            **host_versions(options),
            "torch": torch.__version__,
            "threads": 1,
            "tokens": options.tokens,
            "seq_length": options.seq_length,
            "micro_batch_size": options.micro_batch_size,
            "repeats": options.repeats,
            **rates(single, "gpt_mtokens_per_s", options),
            **rates(single, "gpt_pinned_layout_mtokens_per_s", options, contiguous=True),
            **rates(blend, "blend_mtokens_per_s", options),
        }
    keep(options, row)


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
    key: str,
    options: argparse.Namespace,
    *,
    contiguous: bool = False,
) -> dict[str, float]:
    """Millions of tokens a second of some passes over the dataset."""
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
            found.append(tokens / (time.perf_counter() - begin) / 1e6)
    return spread(found, key, 1)


if __name__ == "__main__":
    main()
