"""The engine against writing one prompt alone, read anew for every token."""

import pytest
import torch

from mcore_infer import Engine, EngineConfig, Generation, SamplingConfig, generate, load_model
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.testing.ranks import run_ranks

PROMPTS = [[10, 20, 30], [40], [10, 20, 30, 80, 90, 100, 110, 120, 130], [10, 20, 30, 80, 90]]
SAMPLINGS = [
    SamplingConfig(num_tokens=8, top_k=1),
    SamplingConfig(num_tokens=11),
    SamplingConfig(num_tokens=3, temperature=0.7, top_k=20),
    SamplingConfig(num_tokens=8, top_p=0.8),
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


def alone(model):
    return [
        generate(model, [prompt], sampling, seed=3 + i)[0]
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]


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
    expected = alone(model)
    assert_same(written(engine), expected)
    assert_same(written(engine), expected)  # from pages of the first round
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_pages


def test_rows_of_padding_change_no_page_but_their_own(model):
    """Every number of requests up to one more than a size of steps."""
    engine = Engine(model, EngineConfig(max_sequence_tokens=40, page_tokens=4, max_requests=9))
    assert engine.decoder.sizes == [1, 2, 4, 8, 9]
    expected = generate(model, [PROMPTS[0]], SAMPLINGS[0])[0]
    for count in range(1, 10):
        for _ in range(count):
            engine.add(PROMPTS[0], SAMPLINGS[0])
        engine.step()  # reads the prompts
        before = engine.cache.layer(1).keys.clone()
        engine.step()
        changed = (engine.cache.layer(1).keys != before).flatten(1).any(1).nonzero().flatten()
        assert len(changed.tolist()) <= count + 1
        results = [e[1] for e in engine.run() if isinstance(e, tuple)]
        assert_same(results, [expected] * count)


def test_a_step_may_hold_more_tokens_than_the_model_has_positions(model):
    config = EngineConfig(max_sequence_tokens=40, page_tokens=4, max_tokens=200)
    prompts = [[i] * 30 for i in range(4)]
    samplings = [SAMPLINGS[0]] * 4
    results = written(Engine(model, config), prompts, samplings)
    assert_same(results, [generate(model, [p], SAMPLINGS[0])[0] for p in prompts])


def test_freed_pages_are_never_read(model):
    engine = Engine(model, CONFIGS["too few pages"])
    written(engine)
    engine.scheduler.pool.forget_prefixes()
    for number in range(model.config.num_layers):
        layer = engine.cache.layer(number)
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    assert_same(written(engine), alone(model))


def test_ends_and_stop_sequences_end_one_request(model):
    whole = alone(model)
    eod, stop = whole[0].ids[3], [list(whole[1].ids[4:6])]
    results = written(Engine(model, CONFIGS["all at once"]), eod=eod, stop=stop)
    for i, result in enumerate(results):
        (expected,) = generate(
            model, [PROMPTS[i]], SAMPLINGS[i], seed=3 + i, eod=eod, stop=stop
        )
        assert_same([result], [expected])


def test_an_aborted_request_leaves_the_others_and_gives_its_pages_back(model):
    engine = Engine(model, CONFIGS["prompts in chunks"])
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
    assert not engine.has_work
    model.train()
    try:
        with pytest.raises(ValueError, match="eval mode"):
            Engine(model, EngineConfig())
    finally:
        model.eval()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hybrid_override_pattern": "M*", "mamba_num_groups": 1}, "state of Mamba layers"),
        ({"rope_type": "dynamic", "rotary_scaling_factor": 2.0}, "--rope-type dynamic"),
    ],
)
def test_a_model_that_pages_cannot_hold_is_refused(fields, message):
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config = TransformerConfig(**sizes, max_position_embeddings=64, **fields)
    model = GPT(config, ParallelContext.single(), vocab_size=64, device="meta").eval()
    with pytest.raises(ValueError, match=message):
        Engine(model, EngineConfig())


def write_on_ranks(folder):
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
    model = load_model(folder, ctx).model
    return [(r.ids, r.log_probs) for r in written(Engine(model, CONFIGS["too few pages"]))]


def test_tensor_ranks_write_the_same(model, run_folder):
    expected = [r.ids for r in alone(model)]
    for results in run_ranks(write_on_ranks, 2, run_folder):
        assert [ids for ids, _ in results] == expected
