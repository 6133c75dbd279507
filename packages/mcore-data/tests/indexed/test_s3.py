"""The commands against a server of S3's protocol, where moto and s3fs are installed."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.loading.loader import build_loader
from mcore_data.preprocessing.work_plan import make_plan, merge_plan

pytestmark = pytest.mark.slow

OPTIONS = ("--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "2")


@pytest.fixture
def bucket(monkeypatch):
    """A client of a server, which the environment names, and its one bucket."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0
    )
    s3fs = pytest.importorskip("s3fs")
    s3fs.S3FileSystem.clear_instance_cache()  # which may be of another server
    import boto3

    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in {
        "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": url,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=url)
    client.create_bucket(Bucket="corpus")
    yield client
    server.stop()


def command(*words):
    return subprocess.Popen(
        [sys.executable, "-m", "mcore_data", "preprocess", *map(str, words), *OPTIONS]
    )


def killed_once_it_writes(prefix, *words):
    """Run, and kill without notice as soon as tokens are on the disk."""
    process = command(*words)
    partial = prefix.with_name(f"{prefix.name}_text_document.bin.partial")
    while process.poll() is None and not (partial.exists() and partial.stat().st_size):
        time.sleep(0.01)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_a_corpus_is_read_from_s3_over_a_kill_and_its_pair_from_there(bucket, tmp_path):
    draw = random.Random(1)
    lines = [
        json.dumps({"text": " ".join(draw.choices(["in", "the", "deep"], k=300))}) + "\n"
        for _ in range(30_000)
    ]
    plain, packed = "".join(lines[:20_000]).encode(), "".join(lines[20_000:]).encode()
    (tmp_path / "a.jsonl").write_bytes(plain)
    (tmp_path / "b.jsonl").write_bytes(packed)
    bucket.put_object(Bucket="corpus", Key="books/a.jsonl", Body=plain)
    bucket.put_object(Bucket="corpus", Key="books/b.jsonl.gz", Body=gzip.compress(packed))
    bucket.put_object(Bucket="corpus", Key="books/README.md", Body=b"no record")
    local, remote = tmp_path / "local", tmp_path / "remote"
    here = ("--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--output-prefix", local)
    there = ("--input", "s3://corpus/books", "--output-prefix", remote)
    assert command(*here).wait() == 0
    for _ in range(2):
        killed_once_it_writes(remote, *there)
    assert command(*there).wait() == 0
    for kind in ("bin", "idx"):
        path = tmp_path / f"remote_text_document.{kind}"
        assert path.read_bytes() == (tmp_path / f"local_text_document.{kind}").read_bytes()
        bucket.upload_file(str(path), "corpus", f"data/pair.{kind}")
    pair = IndexedDataset("s3://corpus/data/pair", cache_path=tmp_path / "cache")
    theirs = GPTDataset(IndexedDataset(f"{local}_text_document"), sequence_length=512)
    ours = GPTDataset(pair, sequence_length=512)
    assert len(ours) == len(theirs)
    for i in range(0, len(ours), 97):
        assert (ours[i]["tokens"] == theirs[i]["tokens"]).all()


def test_units_of_killed_workers_lie_in_s3_and_loaders_read_them_from_there(bucket, tmp_path):
    lines = [json.dumps({"text": f"number {i} " * (i % 90)}) + "\n" for i in range(9000)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    inputs = ("--input", tmp_path / "a.jsonl", "--output-prefix")
    assert command(*inputs, tmp_path / "whole").wait() == 0
    tokenizer = TokenizerConfig(tokenizer_type="ByteTokenizer")
    config = PreprocessConfig(
        input=(str(tmp_path / "a.jsonl"),), output_prefix="s3://corpus/c", append_eod=True
    )
    plan = make_plan(config, tokenizer, 500_000)
    words = [sys.executable, "-m", "mcore_data", "preprocess", "--plan", plan.address]
    draw = random.Random(3)
    for number in range(3):
        words_of_host = [*words, "--scratch-path", str(tmp_path / f"host{number}")]
        worker = subprocess.Popen(words_of_host)
        if number < 2:
            time.sleep(draw.uniform(1.5, 4))
            worker.kill()
        assert (worker.wait() == 0) == (number == 2)
    assert merge_plan(plan, scratch_path=tmp_path)["text"].num_documents == 9000
    theirs = GPTDataset(IndexedDataset(tmp_path / "whole_text_document"), sequence_length=256)
    cache = {"cache_path": tmp_path / "cache", "cache_bytes": 1 << 30}
    ours = GPTDataset(
        IndexedDataset("s3://corpus/c_text_document", **cache), sequence_length=256
    )
    for workers, consumed in ((0, 0), (2, 0), (2, 4000)):  # the last as after a restart
        options = {"micro_batch_size": 8, "consumed_samples": consumed}
        pairs = zip(
            build_loader(theirs, **options),
            build_loader(ours, **options, num_workers=workers),
            strict=True,
        )
        assert all((one["tokens"] == other["tokens"]).all() for one, other in pairs)
