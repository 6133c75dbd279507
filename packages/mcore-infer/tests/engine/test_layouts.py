"""Engines over several ranks write what one rank does."""

import os
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from queue import SimpleQueue

import pytest
import torch
import torch.distributed as dist
from warm_ranks import run_ranks

from mcore_infer import (
    InferenceConfig,
    NewToken,
    SamplingConfig,
    ScoreRequest,
    build_engine,
    generate,
    load_model,
    score_continuations,
    score_documents,
)
from mcore_infer.commands import generating
from mcore_infer.commands.opening import ModelOptions
from mcore_infer.engine.checks import check_speculation
from mcore_infer.engine.stages import own_stage
from mcore_infer.evaluation.continuations import Continuation
from mcore_infer.generation import stream_texts
from mcore_infer.server.worker import EngineWorker, follow
from mcore_infer.writing.sequence import TextRequest
from mcore_models.config import TransformerConfig
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import Axis, ParallelContext

PROMPTS = [[10, 20, 30, 80, 90, 100, 110, 120, 130], [40], [10, 20, 30, 80, 95]]
SAMPLING = SamplingConfig(num_tokens=7, top_p=0.8)
SCORES = (ScoreRequest(num_top=2, prompt=True), ScoreRequest(num_top=1))
FLOAT64 = {"dtype": torch.float64}
SHARING = TransformerConfig(
    num_layers=6, hidden_size=8, num_attention_heads=2, num_kv_shared_layers=2
)


def printed(folder, tp=0):
    """What the command prints."""
    options = ModelOptions(load=str(folder), device="cpu", tensor_model_parallel_size=tp)
    sampling, out = SamplingConfig(num_tokens=9, temperature=0.9), StringIO()
    prompts = ("In the", "And", "In the end")
    with redirect_stdout(out):
        assert not generating.generate(options, sampling, InferenceConfig(), prompts, seed=5)
    return out.getvalue()


def printed_by_ranks(folder):
    """The same on each of two ranks."""
    rank = dist.get_rank()
    names = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    os.environ |= names
    try:
        return printed(folder, tp=1)
    finally:
        for name in names:
            del os.environ[name]


def test_replicas_share_texts_and_the_first_rank_prints_all(run_folder):
    expected = printed(run_folder)
    assert len(expected) > 40
    assert run_ranks(printed_by_ranks, 2, run_folder) == [expected, ""]


def written_by(ctx, folder, rounds=SCORES):
    """What requests get, which replicas share; where they share experts they step together."""
    loaded = load_model(folder, ctx, **FLOAT64)
    config = InferenceConfig(
        inference_max_requests=2,
        inference_dynamic_batching_max_tokens=4,
        inference_dynamic_batching_block_size=2,
    )
    engine = build_engine(loaded.model, config, replicas=loaded.data, in_step=loaded.in_step)
    results = {}
    for scores in rounds:  # without those of prompts the last one shares pages of the first
        numbers = {
            engine.add(prompt, SAMPLING, seed=3 + i, scores=scores): i
            for i, prompt in enumerate(PROMPTS)
            if i % loaded.data.size == loaded.data.rank
        }
        for event in engine.run():
            if isinstance(event, tuple):
                results.setdefault(numbers[event[0]], []).append(event[1])
    assert engine.scheduler.pool.num_free == engine.config.num_pages
    return results


def written_by_experts(folder, dense_folder):
    """On tensor ranks that each have half of the experts, and on two replicas that do."""
    found = []
    for tp in (2, 1):
        config = ParallelConfig(
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=1,
        )
        ctx = ParallelContext.build(config)
        found.append(written_by(ctx, folder))
        if tp == 2:
            draft = load_model(dense_folder, ctx, **FLOAT64).model
            proposing = InferenceConfig(
                num_speculative_tokens=2, speculative_drafts="model", draft_load="model"
            )
            model, texts = load_model(folder, ctx, **FLOAT64).model, [[] for _ in PROMPTS]
            for token in stream_texts(model, PROMPTS, SAMPLING, proposing, seed=3, draft=draft):
                texts[token.row].append(token.id)
    loaded = load_model(folder, ctx)
    replicas = {"replicas": loaded.data, "in_step": loaded.in_step}
    proposing = InferenceConfig(num_speculative_tokens=1, speculative_drafts="mtp")
    with pytest.raises(ValueError, match="runs extra forwards, which replicas"):
        build_engine(loaded.model, proposing, **replicas)
    prompts, limits = [[1], [1] * 50], InferenceConfig()  # the second rank's
    with pytest.raises(ValueError, match="prompt 1 has 50 tokens"):
        next(stream_texts(loaded.model, prompts, SAMPLING, limits, **replicas))
    return *found, texts


def assert_same(results, expected):
    for i, rounds in results.items():
        for result, other in zip(rounds, expected[i], strict=True):
            assert (result.ids, result.finish_reason) == (other.ids, other.finish_reason)
            assert result.log_probs == pytest.approx(other.log_probs, abs=1e-9)
            assert result.prompt_log_probs == pytest.approx(other.prompt_log_probs, abs=1e-9)
            for found, wanted in zip(result.top, other.top, strict=True):
                assert dict(found) == pytest.approx(dict(wanted), abs=1e-9)


def test_experts_on_several_ranks_write_what_those_of_one_rank_do(expert_folder, run_folder):
    expected = written_by(ParallelContext.single(), expert_folder)
    assert len(expected) == len(PROMPTS)
    for rank, (within, between, drafted) in enumerate(
        run_ranks(written_by_experts, 2, expert_folder, run_folder)
    ):
        assert len(within) == len(PROMPTS)
        assert drafted == [list(expected[i][0].ids) for i in range(len(PROMPTS))]
        assert_same(within, expected)
        # The second has one short text, and computes padding until those of the first end.
        assert sorted(between) == [i for i in range(len(PROMPTS)) if i % 2 == rank]
        assert_same(between, expected)


def written_by_stages(folder, hybrid_folder):
    """On two stages: in an engine, plain, with recurrent layers and with a draft model."""
    ctx = ParallelContext.build(ParallelConfig(pipeline_model_parallel_size=2))
    model = load_model(folder, ctx).model
    assert list(model.blocks) == [str(ctx.pp.rank)]
    proposing = InferenceConfig(
        num_speculative_tokens=2, speculative_drafts="model", draft_load="model"
    )
    texts = [[] for _ in PROMPTS]
    for token in stream_texts(model, PROMPTS, SAMPLING, proposing, seed=3, draft=model):
        assert token.log_prob is None  # a command reads no log probabilities
        texts[token.row].append(token.id)
    with pytest.raises(ValueError, match="only the last stage has"):
        check_speculation(model, "mtp", None)
    engines = written_by(ctx, folder), written_by(ctx, hybrid_folder, SCORES[1:])
    return *engines, texts, *judged(model)


def judged(model):
    """What needs no engine."""
    texts = generate(model, PROMPTS, SAMPLING, seed=3)
    rows = [Continuation(tuple(prompt), 1) for prompt in PROMPTS[::2]]
    score = score_documents(model, PROMPTS, begin_token=256, context_tokens=6, batch=2)
    return texts, score_continuations(model, rows), score


def test_stages_write_and_judge_what_one_rank_does(run_folder, hybrid_folder):
    single = ParallelContext.single()
    expected = written_by(single, run_folder), written_by(single, hybrid_folder, SCORES[1:])
    texts, answers, score = judged(load_model(run_folder, single).model)
    for plain, recurrent, drafted, *others in run_ranks(
        written_by_stages, 2, run_folder, hybrid_folder
    ):
        assert len(plain) == len(recurrent) == len(PROMPTS)
        assert_same(plain, expected[0])
        assert_same(recurrent, expected[1])
        assert drafted == [list(expected[0][i][0].ids) for i in range(len(PROMPTS))]
        assert_same(dict(enumerate([text] for text in others[0])), [[text] for text in texts])
        for answer, other in zip(others[1], answers, strict=True):
            assert answer.log_prob == pytest.approx(other.log_prob, abs=1e-9)
        assert others[2].loss_sum == pytest.approx(score.loss_sum, abs=1e-9)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="exceeds the 1 layers"):
        own_stage(
            replace(SHARING, num_layers=1, num_kv_shared_layers=0),
            Axis("pp", 2, 0, None, (0, 1)),
        )


def test_stages_that_lack_keys_of_their_layers_are_refused_on_all_ranks():
    for rank in range(3):
        with pytest.raises(ValueError, match=r"layer 4 reads .* of layer 3, which"):
            own_stage(SHARING, Axis("pp", 3, rank, None, (0, 1, 2)))
    assert own_stage(SHARING, Axis("pp", 2, 1, None, (0, 1))).layers == range(3, 6)


def served_by_replicas(folder):
    """What groups get from a worker, whose two replicas have half of the experts each."""
    ctx = ParallelContext.build(ParallelConfig(expert_model_parallel_size=2))
    loaded = load_model(folder, ctx, **FLOAT64)
    engine = build_engine(
        loaded.model, InferenceConfig(), replicas=loaded.data, in_step=loaded.in_step
    )
    replicas = replace(loaded.data, group=None)  # on GPUs it runs behind the model's steps
    if ctx.world.rank:
        follow(engine, loaded.world, replicas)
        return engine.scheduler.pool.num_free == engine.config.num_pages
    worker, events, over = EngineWorker(engine, loaded.world, replicas), SimpleQueue(), {}
    for i, prompt in enumerate([*PROMPTS, [300]]):
        fields = {"sampling": SAMPLING, "num_tokens": SAMPLING.num_tokens, "seed": 3 + i}
        worker.submit([TextRequest(prompt=prompt, scores=SCORES[0], **fields)])
    counts = []

    def deliver(found):
        counts.append(worker.requests.counts)
        for event in found:
            events.put(event)

    worker.start(deliver)
    while len(over) < len(PROMPTS) + 1:
        event = events.get(timeout=60)
        if not isinstance(event.what, NewToken):
            over[event.group - 1] = [event.what]
    worker.stop()
    assert counts[0]["requests_running"] == len(PROMPTS)
    assert worker.requests.counts["requests_running"] == 0
    assert counts[0]["pages"] == 2 * engine.config.num_pages
    return over


def test_a_worker_hands_requests_to_replicas_that_share_experts(expert_folder):
    expected = written_by(ParallelContext.single(), expert_folder)
    found, is_free = run_ranks(served_by_replicas, 2, expert_folder)
    assert is_free
    assert "leave the vocabulary" in found.pop(len(PROMPTS))[0].message
    assert len(found) == len(PROMPTS)
    assert_same(found, {i: rounds[:1] for i, rounds in expected.items()})
