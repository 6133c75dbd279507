"""The engine against writing one prompt alone, read anew for every token."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from warm_ranks import run_ranks

from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer import (
    Engine,
    EngineConfig,
    Generation,
    InferenceConfig,
    SamplingConfig,
    ScoreRequest,
    TokenRules,
    build_engine,
    generate,
    load_model,
)
from mcore_infer.engine.sampling import choose
from mcore_infer.generation import next_logits
from mcore_infer.kv_cache import StaticCache
from mcore_infer.writing.sequence import NewToken, RunningSequence, TextRequest
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.kernels.batch_invariant import token_log_probs
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.precision.gemm import PlainGemm

PROMPTS = [
    [10, 20, 30],
    [40],
    [10, 20, 30, 80, 90, 100, 110, 120, 130],
    [10, 20, 30, 80, 90],
    [10, 20, 30],
]
SAMPLINGS = [
    SamplingConfig(num_tokens=8, top_k=1),
    SamplingConfig(num_tokens=11),
    SamplingConfig(num_tokens=3, temperature=0.7, top_k=20),
    SamplingConfig(num_tokens=8, top_p=0.8),
    SamplingConfig(
        num_tokens=8,
        top_p=0.9,
        top_p_decay=0.9,
        top_p_bound=0.5,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
    ),
]


def written(engine, prompts=PROMPTS, samplings=SAMPLINGS, **options):
    """What each request writes, and that its stream is the same."""
    numbers = [
        engine.add(prompt, sampling, seed=3 + i, **options)
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    results, streamed = {}, {number: [] for number in numbers}
    for event in engine.run():
        if isinstance(event, tuple):
            results[event[0]] = event[1]
        else:
            streamed[event.row].append((event.id, event.log_prob))
    for number in numbers:
        result = results[number]
        assert streamed[number] == list(zip(result.ids, result.log_probs, strict=True))
    return [results[number] for number in numbers]


@cache
def alone(model):
    """What each prompt's text is where it is read anew for every token; no engine, no cache."""
    results = []
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        text = RunningSequence(
            TextRequest(
                prompt=prompt, sampling=sampling, num_tokens=sampling.num_tokens, seed=3 + i
            )
        )
        while not text.finish_reason:
            logits = next_logits(model, torch.tensor([[*prompt, *text.ids]]))
            chosen = choose(logits, [text])
            text.add(NewToken(0, chosen.item(), token_log_probs(logits, chosen).item()))
        results.append(text.result())
    return results


def assert_same(results, expected):
    for result, other in zip(results, expected, strict=True):
        assert isinstance(result, Generation)
        assert result.ids == other.ids
        assert result.finish_reason == other.finish_reason
        assert result.log_probs == pytest.approx(other.log_probs, abs=1e-9)


CONFIGS = {
    "all at once": EngineConfig(max_sequence_tokens=40, num_pages=64, page_tokens=4),
    "one at a time": EngineConfig(
        max_sequence_tokens=40, num_pages=16, page_tokens=4, max_requests=1, max_tokens=64
    ),
    "prompts in chunks": EngineConfig(
        max_sequence_tokens=40, num_pages=64, page_tokens=2, max_requests=2, max_tokens=3
    ),
    "too few pages": EngineConfig(
        max_sequence_tokens=40, num_pages=10, page_tokens=2, max_requests=4, max_tokens=8
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_requests_write_together_what_each_would_alone(model, config):
    engine = Engine(model, config)
    gemms = {type(m.gemm) for m in model.modules() if hasattr(m, "gemm")}
    assert gemms == {PlainGemm}  # the user's model is as it was
    expected = alone(model)
    assert_same(written(engine), expected)
    engine.runs_ahead = True
    assert_same(written(engine), expected)  # from pages of the first round
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_pages


def test_neighbours_that_come_and_go_change_no_text(model):
    """Requests in any order, at any step, some aborted, under limits of all kinds."""
    expected, draw = alone(model), random.Random(0)
    for runs_ahead in (False, True, True):
        page_tokens, max_requests = draw.choice([1, 3, 4]), draw.randint(1, 5)
        limits = EngineConfig(
            max_sequence_tokens=40,
            page_tokens=page_tokens,
            num_pages=draw.randint(16, 30) // page_tokens + 1,
            max_requests=max_requests,
            max_tokens=max_requests + draw.randint(0, 6),
            prefix_cache=draw.random() < 0.5,
        )
        engine, numbers, results = Engine(model, limits), {}, {}
        engine.runs_ahead = runs_ahead
        waiting = [draw.randrange(len(PROMPTS)) for _ in range(9)]
        while waiting or engine.has_work:
            while waiting and draw.random() < 0.4:
                i = waiting.pop()
                numbers[engine.add(PROMPTS[i], SAMPLINGS[i], seed=3 + i)] = i
            results |= dict(event for event in engine.step() if isinstance(event, tuple))
            if draw.random() < 0.1 and (going := sorted(numbers.keys() - results.keys())):
                gone = draw.choice(going)
                engine.abort(gone)
                del numbers[gone]
        assert_same([results[n] for n in numbers], [expected[i] for i in numbers.values()])
        assert engine.scheduler.pool.num_free == limits.num_pages


def test_rows_of_padding_change_no_page_but_their_own(model):
    """Every number of requests up to one more than a size of steps."""
    limits = EngineConfig(max_sequence_tokens=40, page_tokens=4, max_requests=9)
    expected = generate(model, [PROMPTS[0]], SAMPLINGS[0])[0]
    for count in range(1, 10):
        engine = Engine(model, limits)
        assert engine.decoder.sizes == [1, 2, 4, 8, 9]
        for _ in range(count):
            engine.add(PROMPTS[0], SAMPLINGS[0])
        engine.step()  # reads the prompts
        before = engine.cache.layer(1).held.keys.clone()
        engine.step()
        changed = (
            (engine.cache.layer(1).held.keys != before).flatten(1).any(1).nonzero().flatten()
        )
        assert (
            len([page for page in changed.tolist() if page < engine.cache.num_pages]) == count
        )
        results = [e[1] for e in engine.run() if isinstance(e, tuple)]
        assert_same(results, [expected] * count)


def test_a_step_may_hold_more_tokens_than_the_model_has_positions(model):
    config = EngineConfig(max_sequence_tokens=40, page_tokens=4, max_tokens=200)
    prompts = [[i] * 30 for i in range(4)]
    samplings = [SAMPLINGS[0]] * 4
    results = written(Engine(model, config), prompts, samplings)
    assert_same(results, [generate(model, [p], SAMPLINGS[0])[0] for p in prompts])


@pytest.mark.parametrize("window_size", [(-1, 0), (3, 0)])
def test_freed_pages_are_never_read(model, window_size):
    """Those of texts that are over or that a window has left behind, and that of padding."""
    config = replace(model.config, window_size=window_size)
    own = GPT(config, ParallelContext.single(), vocab_size=257, dtype=torch.float64).eval()
    own.load_state_dict(model.state_dict())
    engine = Engine(own, replace(CONFIGS["too few pages"], prefix_cache=False))
    numbers = [
        engine.add(prompt, sampling, seed=3 + i)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]
    pool, results = engine.scheduler.pool, {}
    while engine.has_work:
        results |= dict(event for event in engine.step() if isinstance(event, tuple))
        free = [page for page in range(pool.num_pages) if not pool.num_users(page)]
        free.append(pool.num_pages)
        for number in range(config.num_layers):
            held = engine.cache.layer(number).held
            held.keys[free], held.values[free] = torch.nan, torch.nan
    assert_same([results[number] for number in numbers], alone(own))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_scores_of_prompt_and_text_are_those_of_the_whole_text(model, config):
    """Whatever was cut, shared before, or lost and computed again."""
    engine = Engine(model, config)
    written(engine)  # leaves pages that others may share
    wanted = ScoreRequest(num_top=3, prompt=True)
    for result, prompt in zip(written(engine, scores=wanted), PROMPTS, strict=True):
        text = [*prompt, *result.ids]
        hidden, _ = model(torch.tensor([text[:-1]]))
        expected = model.logits(hidden)[:, 0, : model.vocab_size].log_softmax(-1)
        values, ids = expected.topk(3)
        chosen = expected.gather(-1, torch.tensor(text[1:])[:, None])[:, 0].tolist()
        assert [*result.prompt_log_probs, *result.log_probs] == pytest.approx(chosen, abs=1e-9)
        tops = [*result.prompt_top, *result.top]
        assert [[i for i, _ in top] for top in tops] == ids.tolist()
        for top, row in zip(tops, values.tolist(), strict=True):
            assert [value for _, value in top] == pytest.approx(row, abs=1e-9)


def test_only_what_a_request_wants_is_scored_and_a_prompt_may_be_scored_alone(model):
    engine = Engine(model, CONFIGS["prompts in chunks"])
    alone_scored = engine.add(
        PROMPTS[2], SAMPLINGS[0], num_tokens=0, scores=ScoreRequest(prompt=True)
    )
    bare = engine.add(PROMPTS[0], SAMPLINGS[0], scores=ScoreRequest(log_probs=False))
    scored = engine.add(PROMPTS[0], SAMPLINGS[0])
    results = dict(event for event in engine.run() if isinstance(event, tuple))
    assert results[alone_scored].ids == ()
    assert len(results[alone_scored].prompt_log_probs) == len(PROMPTS[2]) - 1
    assert results[bare].ids == results[scored].ids
    assert (results[bare].log_probs, len(results[scored].log_probs)) == ((), 8)


def test_a_rule_bans_a_token_or_forces_it_and_leaves_the_others(model):
    first = alone(model)[0].ids
    banned = TokenRules(bias=((first[0], -1e9),))
    forced = TokenRules(bias=((65, 1e9),))
    after = TokenRules(never_after=(PROMPTS[0][-1], first[0]))
    engine = Engine(model, CONFIGS["all at once"])
    numbers = [
        engine.add(PROMPTS[0], SAMPLINGS[0], seed=3, rules=rules)
        for rules in (banned, forced, after, None)
    ]
    results = dict(event for event in engine.run() if isinstance(event, tuple))
    assert first[0] not in results[numbers[0]].ids
    assert results[numbers[1]].ids == (65,) * 8
    assert results[numbers[2]].ids[0] != first[0]
    assert results[numbers[3]].ids == first


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_ends_and_stop_sequences_end_one_request(model, runs_ahead):
    whole = alone(model)
    eod, stop = whole[0].ids[3], [list(whole[1].ids[4:6])]
    engine = Engine(model, CONFIGS["one at a time" if runs_ahead else "all at once"])
    engine.runs_ahead = runs_ahead
    results = written(engine, eod=eod, stop=stop)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    for i, result in enumerate(results):
        (expected,) = generate(
            model, [PROMPTS[i]], SAMPLINGS[i], seed=3 + i, eod=eod, stop=stop
        )
        assert_same([result], [expected])


def test_an_aborted_request_leaves_the_others_and_gives_its_pages_back(model):
    engine = Engine(model, CONFIGS["prompts in chunks"])
    engine.runs_ahead = True
    gone = engine.add([7] * 20, SAMPLINGS[1])
    for _ in range(3):
        engine.step()
    waiting = engine.add([8] * 20, SAMPLINGS[1])
    numbers = [
        engine.add(prompt, sampling, seed=3 + i)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]
    engine.step()
    engine.abort(gone)
    engine.abort(waiting)
    results = dict(e for e in engine.run() if isinstance(e, tuple))
    assert_same([results[n] for n in numbers], alone(model))
    engine.abort(numbers[0])  # is over: nothing happens
    assert engine.scheduler.pool.num_free == engine.config.num_pages


def test_a_request_that_does_not_fit_is_refused_and_nothing_is_queued(model):
    engine = Engine(model, EngineConfig(max_sequence_tokens=100))
    with pytest.raises(ValueError, match=r"maximum context length was exceeded.*40 positions"):
        engine.add([1] * 36, SamplingConfig(num_tokens=5))
    with pytest.raises(ValueError, match="ids 1 to 257 leave the vocabulary, 0 to 256"):
        engine.add([1, 257], SAMPLINGS[0])
    with pytest.raises(ValueError, match="leave the vocabulary"):
        engine.add([1], SAMPLINGS[0], rules=TokenRules(bias=((-1, 1.0),)))
    with pytest.raises(ValueError, match="exceed the vocabulary of 257"):
        engine.add([1], SamplingConfig(num_tokens=1, top_k=258))
    assert not engine.has_work
    model.train()
    try:
        with pytest.raises(ValueError, match="eval mode"):
            Engine(model, EngineConfig())
    finally:
        model.eval()


STRETCHED = {
    "dynamic": {"rotary_scaling_factor": 4.0},
    "longrope": {"longrope_short_factor": (1.0, 1.2), "longrope_long_factor": (2.0, 5.0)},
}


@pytest.mark.parametrize("kind", STRETCHED)
def test_positions_stretched_by_the_length_of_a_text_are_those_of_one_text_a_step(kind):
    """Texts grow beyond the original context; each is read at once and written alone."""
    fields = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    fields |= {"rope_type": kind, "original_max_position_embeddings": 8, **STRETCHED[kind]}
    config = TransformerConfig(**fields, max_position_embeddings=64, init_method_std=0.3)
    ctx = ParallelContext.single()
    model = GPT(config, ctx, vocab_size=ByteTokenizer.vocab_size, dtype=torch.float64).eval()
    engine = Engine(model, CONFIGS["prompts in chunks"])
    assert (engine.config.max_requests, engine.config.chunked_prefill) == (1, False)
    results = written(engine)
    for i, prompt in enumerate(PROMPTS):
        if kind == "dynamic":
            assert list(results[i].ids) == grown(model, prompt, SAMPLINGS[i], seed=3 + i)
    if kind == "longrope":  # beyond its context all keys are rotated anew
        assert_same(results, alone(model))
    limits = EngineConfig(max_sequence_tokens=40, num_speculative_tokens=2)
    with pytest.raises(ValueError, match=f"--rope-type {kind} .* --num-speculative-tokens 0"):
        Engine(model, limits)


def grown(model, prompt, sampling, seed):
    """What one text writes with keys that stay as they were rotated; no engine."""
    text = RunningSequence(
        TextRequest(prompt=prompt, sampling=sampling, num_tokens=sampling.num_tokens, seed=seed)
    )
    cache, tokens = StaticCache(40), prompt
    while not text.finish_reason:
        chosen = choose(next_logits(model, torch.tensor([tokens]), cache), [text]).tolist()
        text.add(NewToken(0, chosen[0], 0.0))
        tokens = chosen
    return text.ids


def test_scores_that_fall_with_distance_are_those_of_one_text_alone():
    fields = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 6}
    fields |= {"position_embedding_type": "alibi", "init_method_std": 0.3}
    config = TransformerConfig(**fields, max_position_embeddings=40, embedding_layernorm=True)
    ctx = ParallelContext.single()
    model = GPT(config, ctx, vocab_size=ByteTokenizer.vocab_size, dtype=torch.float64).eval()
    assert_same(written(Engine(model, CONFIGS["prompts in chunks"])), alone(model))


def test_pages_come_from_memory_and_no_more_than_requests_can_use(model):
    # Keys and values of 2 layers, 2 groups of 4, in float64.
    page_bytes = 2 * 2 * 2 * 4 * 8 * 16
    fields = {"inference_max_requests": 3, "inference_dynamic_batching_block_size": 16}
    engine = build_engine(model, InferenceConfig(**fields))
    assert engine.config.max_sequence_tokens == 40
    assert engine.config.num_pages == 3 * 3
    size = 10 * page_bytes / 2**30
    fields["inference_dynamic_batching_buffer_size_gb"] = size
    assert build_engine(model, InferenceConfig(**fields)).config.num_pages == 9
    fields["inference_dynamic_batching_buffer_size_gb"] = size / 10
    with pytest.raises(ValueError, match="raise --inference-dynamic-batching-buffer-size-gb"):
        build_engine(model, InferenceConfig(**fields))


def write_on_ranks(folder, hybrid_folder):
    """Plain, with proposals, and with a recurrent state."""
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
    model, config = load_model(folder, ctx).model, CONFIGS["too few pages"]
    engines = [
        Engine(model, config),
        Engine(model, replace(config, num_speculative_tokens=2)),
        Engine(load_model(hybrid_folder, ctx).model, config),
    ]
    # One rank has room for more.
    fields = {"inference_dynamic_batching_buffer_size_gb": (1 + ctx.tp.rank) * 10 * 2**-17}
    num_pages = build_engine(model, InferenceConfig(**fields)).config.num_pages
    return num_pages, [[result.ids for result in written(engine)] for engine in engines]


def test_tensor_ranks_write_the_same(model, run_folder, hybrid_folder):
    expected = [r.ids for r in alone(model)]
    hybrid = load_model(hybrid_folder, ParallelContext.single()).model
    recurrent = [r.ids for r in alone(hybrid)]
    for num_pages, texts in run_ranks(write_on_ranks, 2, run_folder, hybrid_folder):
        assert texts == [expected, expected, recurrent]
        assert num_pages == 9
