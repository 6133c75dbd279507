"""The engine's thread, over ranks, and when it fails."""

import asyncio
import http.client
import json
import os
import queue
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from warm_ranks import run_command, run_ranks

from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer import InferenceConfig, SamplingConfig, build_engine, generate, load_model
from mcore_infer.server.worker import EngineWorker, RefusedGroup, follow
from mcore_infer.writing.grammars import Structure
from mcore_infer.writing.sequence import Generation, ScoreRequest, TextRequest, TokenRules
from mcore_infer.writing.structured import Grammars
from mcore_parallel.config import ParallelConfig
from mcore_parallel.launch.launcher import free_port
from mcore_parallel.mesh import ParallelContext

HERE = Path(__file__).parent

CONFIG = InferenceConfig(inference_max_requests=4, inference_dynamic_batching_block_size=4)
PLAIN = SamplingConfig(num_tokens=6, temperature=0.9)


def request(prompt, **fields):
    options = {"sampling": PLAIN, "num_tokens": 6, "seed": 3} | fields
    return TextRequest(prompt=list(prompt), **options)


def serve_on_ranks(folder):
    """What groups get on rank 0 of two; the other follows."""
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
    engine = build_engine(load_model(folder, ctx).model, CONFIG)
    engine.grammars = Grammars(ByteTokenizer(), engine.model.vocab_size)
    axis = engine.model.tp
    if axis.rank:
        follow(engine, axis)
        ctx.destroy()
        return engine.scheduler.pool.num_free == engine.config.num_pages
    worker, events, over = EngineWorker(engine, axis), queue.SimpleQueue(), {}
    worker.start(lambda found: [events.put(event) for event in found])
    rules = TokenRules(bias=((65, 50.0),), never_after=(65, 66))
    scores = ScoreRequest(num_top=2, prompt=True)
    first = worker.submit([request(b"In the"), request(b"b", rules=rules, scores=scores)])
    gone = worker.submit([request(b"x" * 30, num_tokens=300)])
    refused = worker.submit([request(b"a"), request([1, 257])])
    digits = Structure("regex", "[0-9]{3}")
    asyncio.run(worker.prepare(digits))
    held = worker.submit([request(b"a", structure=digits, eod=256)])
    while len(over) < 4:
        event = events.get(timeout=100)
        if isinstance(event.what, Generation | RefusedGroup):
            over[event.group, event.index] = event.what
    worker.cancel(gone)
    worker.cancel(gone)  # is over: nothing happens
    time.sleep(0.3)  # idle
    second = worker.submit([request(b"In the")])
    while (second, 0) not in over:
        event = events.get(timeout=100)
        if isinstance(event.what, Generation):
            over[event.group, event.index] = event.what
    worker.stop()
    ctx.destroy()
    assert engine.scheduler.pool.num_free == engine.config.num_pages
    assert worker.requests.groups == []
    assert ByteTokenizer().decode(over[held, 0].ids).isdigit()
    assert over[held, 0].finish_reason == "stop"
    return [over[first, 0], over[first, 1], over[refused, 0], over[second, 0]]


def test_ranks_hold_the_same_requests_and_write_what_one_does(long_folder, long_model):
    results, is_free = run_ranks(serve_on_ranks, 2, long_folder)
    assert is_free
    text, biased, refused, again = results
    assert text.ids == again.ids
    assert text.log_probs == pytest.approx(again.log_probs, abs=1e-9)  # in other batches
    alone = generate(long_model.model, [list(b"In the")], PLAIN, seed=3)[0]
    assert text.ids == alone.ids
    assert biased.ids == (65,) * 6
    assert len(biased.top) == 6
    assert "ids 1 to 257 leave the vocabulary" in refused.message


def test_a_fault_of_the_engine_answers_every_request_and_shows_in_its_health(
    failing_client,
):
    engine = failing_client.server.engine_client.worker.requests.engine
    engine.cache.layer(0).held.keys = torch.zeros(1)
    status, answer = failing_client.post("/v1/completions", prompt="a", max_tokens=3)
    assert status == 503
    assert answer["error"]["message"].startswith("the engine failed: ")
    assert failing_client.send("GET", "/health")[0] == 503
    assert failing_client.post("/api", prompts=["a"])[0] == 503


def ask(port):
    """Status and message of a long text, once a server is there."""
    body = json.dumps({"prompt": "In the", "max_tokens": 400, "ignore_eos": True})
    for _ in range(20000):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.01)
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        kind = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", body, kind)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())["error"]["message"]


def run_failing(folder, failing):
    """What a client and the two ranks of a server say, one of which fails."""
    port, words = free_port(), ("--load", folder, "--device", "cpu")
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def run(rank):
        env = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        words_of_rank = ("failing_rank", failing, *words, "--port", port)
        return run_command(*words_of_rank, env=env, cwd=HERE, is_ours=True)

    with ThreadPoolExecutor(3) as pool:
        ranks, asked = [pool.submit(run, rank) for rank in range(2)], pool.submit(ask, port)
        return asked.result(), [rank.result() for rank in ranks]


@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.parity_long)])
def test_a_rank_that_fails_ends_all_and_clients_are_told(long_folder, monkeypatch, failing):
    monkeypatch.syspath_prepend(str(HERE))
    asked, ranks = run_failing(long_folder, failing)
    texts = [one.stderr for one in ranks]
    assert asked == (503, "the engine failed: this server ends."), texts
    assert [one.returncode for one in ranks] == [1, 1], texts
    assert all(f"rank {failing} failed at" in text for text in texts), texts
    assert "no memory for this step" in texts[failing]
