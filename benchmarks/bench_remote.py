"""Measure what training waits for when its tokens lie in an object store.

    python benchmarks/bench_remote.py --tokens 20000000 --step-ms 200

Starts a local server of S3's protocol (moto), tokenizes generated text into units of 4 MB
there, and reads batches of GPT samples as training does. First without worker processes:
bandwidth of the requests with a cold cache, and again with all blocks on the local disk. Then
with ``--num-workers`` processes beside a step of ``--step-ms``: the share of the time that the
step waits for its batch, from the store, from the disk, and from local files. Needs moto,
flask-cors and s3fs. The server is a Python process on the same cores, which copies a whole unit
for each request, so its bandwidth is a lower bound of the reader's.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import add_options, host_versions, keep

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.indexed.object_store import StoreBins
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.loading.loader import build_loader
from mcore_data.preprocessing.plan_worker import work_on_plan
from mcore_data.preprocessing.work_plan import make_plan, merge_plan

ADDRESS = "s3://bench/tokens"


def main() -> None:
    """Run the benchmark by the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=200.0)
    parser.add_argument("--name", default="remote-shards")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    row: dict[str, object] = {"name": options.name, **host_versions(options)}
    row |= {
        name: getattr(options, name)
        for name in ("tokens", "seq_length", "micro_batch_size", "num_workers", "step_ms")
    }
    with tempfile.TemporaryDirectory() as name, s3_server():
        folder = Path(name)
        write_text(folder / "text.jsonl", options.tokens)
        for prefix in (str(folder / "tokens"), ADDRESS):
            job = PreprocessConfig(input=(str(folder / "text.jsonl"),), output_prefix=prefix)
            plan = make_plan(job, TokenizerConfig(tokenizer_type="ByteTokenizer"), 2 << 20)
            work_on_plan(plan, scratch_path=str(folder))
            merge_plan(plan, scratch_path=folder)
        row |= read_alone(folder, options)
        sources = {"store": ("waits", 0), "disk": ("disk", 1 << 40), "local": ("", 0)}
        for source, (cache, limit) in sources.items():
            prefix = ADDRESS if cache else folder / "tokens"
            dataset = open_dataset(prefix, cache_path=folder / cache, cache_bytes=limit)
            row[f"waiting_share_{source}"] = share_of_waiting(dataset, options)
    keep(options, row)


@contextmanager
def s3_server() -> Iterator[None]:
    """Start a server in a process of its own, which the environment names to fsspec."""
    import boto3  # pyrefly: ignore[missing-import]
    from botocore.exceptions import EndpointConnectionError  # pyrefly: ignore[missing-import]

    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "5123"]
    silent = subprocess.DEVNULL
    server = subprocess.Popen(words, stdout=silent, stderr=silent)
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": "http://127.0.0.1:5123",
    }  # fmt: skip
    try:
        client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
        while True:
            with suppress(EndpointConnectionError):  # while it starts
                client.create_bucket(Bucket="bench")
                break
            if server.poll() is not None:
                raise RuntimeError("moto.server ended: install moto[server] and flask-cors.")
            time.sleep(0.5)
        yield
    finally:
        server.terminate()
        server.wait()


def write_text(path: Path, num_tokens: int) -> None:
    """Write documents of 1 to 2 000 random letters, each a token of ByteTokenizer."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 2000, num_tokens // 1000)
    letters = random.integers(ord("a"), ord("z") + 1, int(lengths.sum()), np.uint8).tobytes()
    ends = np.cumsum(lengths).tolist()
    with path.open("wb") as file:
        for start, end in itertools.pairwise([0, *ends]):
            file.write(b'{"text": "%s"}\n' % letters[start:end])


def open_dataset(prefix: str | Path, **cache: Any) -> IndexedDataset:
    """Open the dataset at a prefix of the plan."""
    return IndexedDataset(f"{prefix}_text_document", **cache)


def read_alone(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Read all batches in this process, cold and from the disk."""
    row = {}
    for name in ("cold", "disk"):
        dataset = open_dataset(ADDRESS, cache_path=folder / "disk", cache_bytes=1 << 40)
        began = time.perf_counter()
        tokens = sum(batch["tokens"].numel() for batch in batches(dataset, options, 0))
        seconds = time.perf_counter() - began
        assert isinstance(dataset._bin, StoreBins)
        traffic = dataset._bin.traffic
        row[f"{name}_mtokens_per_s"] = round(tokens / seconds / 1e6, 2)
        row[f"{name}_fetched_mb"] = round(traffic.fetched_bytes / 1e6, 1)
        if traffic.waited_s:
            row[f"{name}_fetched_mb_per_s"] = round(
                traffic.fetched_bytes / traffic.waited_s / 1e6, 1
            )
            row[f"{name}_waited_share"] = round(traffic.waited_s / seconds, 3)
            row[f"{name}_bytes_fetched_per_byte_read"] = round(
                traffic.fetched_bytes / (2 * tokens), 1
            )
    return row


def share_of_waiting(dataset: IndexedDataset, options: argparse.Namespace) -> float:
    """Return which share of its time a step of ``--step-ms`` waits for its batch."""
    waited = 0.0
    all_batches = iter(batches(dataset, options, options.num_workers))
    next(all_batches)  # the processes start
    began = time.perf_counter()
    while True:
        asked = time.perf_counter()
        if next(all_batches, None) is None:
            return round(waited / (time.perf_counter() - began), 3)
        waited += time.perf_counter() - asked
        time.sleep(options.step_ms / 1e3)


def batches(
    stored: IndexedDataset, options: argparse.Namespace, num_workers: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the first batches of GPT samples of a dataset."""
    dataset = GPTDataset(stored, sequence_length=options.seq_length)
    loader = build_loader(
        dataset, micro_batch_size=options.micro_batch_size, num_workers=num_workers
    )
    return itertools.islice(loader, options.batches)


if __name__ == "__main__":
    main()
