import gzip
import json
import multiprocessing
import os
import signal

import numpy as np
import pytest

from mcore_data.engines.building import ReferenceEngine
from mcore_data.preprocessing.encoding import Encoder
from mcore_data.preprocessing.sources import find_inputs, read_blocks
from mcore_data.preprocessing.workers import _work, encode_all
from mcore_data.tokenizers.building import load_tokenizer
from mcore_data.tokenizers.plain import ByteTokenizer


class _Failing(ReferenceEngine):
    """Raises, or dies, on certain texts."""

    def encode(self, texts):
        if "raise" in texts:
            raise ValueError("a text that this engine cannot do")
        if "die" in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(texts)


def results(
    tmp_path,
    texts,
    *,
    engine=ReferenceEngine,
    num_workers=2,
    block_bytes=100,
    name="in.jsonl",
    **options,
):
    path = tmp_path / name
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    tokenizer = load_tokenizer("ByteTokenizer")
    encoder = Encoder(engine(tokenizer), None, ("text",), np.dtype("<u2"))
    source = find_inputs([str(path)])[0]
    tasks = ((0, block) for block in read_blocks(source, ("text",), 0, block_bytes))
    processes = set()
    tokens = []
    for _, result in encode_all(
        encoder, tasks, num_workers=num_workers, block_bytes=block_bytes, **options
    ):
        tokens.append(result.keys["text"].tokens.copy())
        processes |= {child.pid for child in multiprocessing.active_children()}
    if num_workers > 1:
        assert len(processes) >= num_workers
    return bytes(np.concatenate(tokens).astype(np.uint8)).decode()


TEXTS = [f"text {i} " + "long " * (i % 50) for i in range(300)]


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_results_come_in_order_from_any_number_of_workers(tmp_path, num_workers):
    assert results(tmp_path, TEXTS, num_workers=num_workers) == "".join(TEXTS)


def test_a_result_that_outgrows_shared_memory_arrives_all_the_same(tmp_path):
    texts = ["short", "x" * 100_000, "short again", "y" * 70_000]
    assert results(tmp_path, texts) == "".join(texts)


def test_blocks_and_results_that_both_outgrow_a_pipe_do_not_wait_for_each_other(tmp_path):
    texts = [letter * 300_000 for letter in "abcdefgh"]
    assert results(tmp_path, texts, name="in.jsonl.gz") == "".join(texts)
    assert results(tmp_path, TEXTS, name="in.jsonl.gz") == "".join(TEXTS)


def test_workers_that_are_not_forked_give_the_same(tmp_path):
    assert results(tmp_path, TEXTS[:20], start_method="spawn") == "".join(TEXTS[:20])


def test_an_error_in_a_worker_is_raised_here_with_where_it_was(tmp_path):
    with pytest.raises(ValueError, match="cannot do") as error:
        results(tmp_path, [*TEXTS, "raise", *TEXTS], engine=_Failing)
    assert "in a worker process" in error.value.__notes__[0]


def test_a_worker_that_dies_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(RuntimeError, match=r"exit code -9.*fewer --workers"):
        results(tmp_path, [*TEXTS, "die", *TEXTS], engine=_Failing)


def test_a_worker_ends_quietly_when_its_answers_are_not_read_any_more():
    ours, theirs = multiprocessing.Pipe()
    theirs.send("an answer")
    ours.close()
    before = signal.getsignal(signal.SIGINT)
    try:
        _work(
            Encoder(ReferenceEngine(ByteTokenizer()), None, ("text",), np.dtype("<u2")),
            theirs,
            [],
            [],
        )
    finally:
        signal.signal(signal.SIGINT, before)
