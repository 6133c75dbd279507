"""Texts written from proposals are those without, whatever is proposed."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from mcore_infer import (
    Engine,
    EngineConfig,
    InferenceConfig,
    SamplingConfig,
    ScoreRequest,
    TokenRules,
)
from mcore_models.building.mtp_model import MTP_TOKENS
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.protocol import MicroBatch
from mcore_parallel.mesh import ParallelContext

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4], [5, 6] * 6, [1, 2, 3, 1, 2, 3, 1, 2], [7, 8, 9]]
SAMPLINGS = [
    SamplingConfig(num_tokens=12, top_k=1),
    SamplingConfig(num_tokens=9),
    SamplingConfig(num_tokens=14, temperature=0.3),
    SamplingConfig(num_tokens=2, top_p=0.8),
    SamplingConfig(num_tokens=12, frequency_penalty=0.5),
]
CONFIGS = {
    "roomy": EngineConfig(max_sequence_tokens=40, num_pages=64, page_tokens=4),
    "prompts in chunks": EngineConfig(
        max_sequence_tokens=40, num_pages=64, page_tokens=2, max_requests=2, max_tokens=5
    ),
    "too few pages": EngineConfig(
        max_sequence_tokens=40, num_pages=13, page_tokens=2, max_requests=4, max_tokens=16
    ),
}


def build(seed, **changes):
    fields = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "mtp_num_layers": 1}
    config = TransformerConfig(
        **fields, max_position_embeddings=40, init_method_std=0.3, **changes
    )
    ctx = ParallelContext.single()
    return GPT(config, ctx, vocab_size=12, seed=seed, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def model():
    return build(1)


def speculating(config, count, drafts="model"):
    return replace(config, num_speculative_tokens=count, speculative_drafts=drafts)


def run(engine, num_seeds=1, **options):
    numbers = [
        engine.add(prompt, sampling, seed=seed, **options)
        for seed in range(num_seeds)
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    results = dict(event for event in engine.run() if isinstance(event, tuple))
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_pages
    return [results[number] for number in numbers]


@pytest.fixture(scope="module")
def plain(model):
    """What is written without proposals, under each config."""
    scores = ScoreRequest(num_top=2)
    return {
        name: run(Engine(model, config), num_seeds=2, scores=scores)
        for name, config in CONFIGS.items()
    }


@pytest.mark.parametrize(
    ("drafts", "name"),
    [
        ("ngram", "roomy"),
        ("mtp", "prompts in chunks"),
        ("itself", "too few pages"),
        ("another", "too few pages"),
    ],
)
def test_every_text_and_score_is_that_without_proposals(model, plain, name, drafts):
    """Proposals of the text, of the model's own layer, of itself and of other weights."""
    config, expected = CONFIGS[name], plain[name]
    draft = {"itself": model, "another": build(2, window_size=(3, 0))}.get(drafts)
    engine = Engine(model, speculating(config, 3, "model" if draft else drafts), draft)
    found = run(engine, num_seeds=2, scores=ScoreRequest(num_top=2))
    for result, other in zip(found, expected, strict=True):
        assert result.ids == other.ids
        assert result.finish_reason == other.finish_reason
        assert result.log_probs == pytest.approx(other.log_probs, abs=1e-9)
        assert [[i for i, _ in top] for top in result.top] == [
            [i for i, _ in top] for top in other.top
        ]
    counts = engine.speculation
    assert counts.steps
    assert 0 < counts.accepted <= counts.drafted
    if drafts == "itself":  # the same draws of the same scores
        assert counts.accepted == counts.drafted
    else:
        assert counts.accepted < counts.drafted


def test_ends_stops_and_rules_hold_inside_of_what_is_accepted(model, plain):
    options = {
        "eod": plain["roomy"][0].ids[5],
        "stop": [list(plain["roomy"][2].ids[3:5])],
        "rules": TokenRules(bias=((3, 0.5),)),
    }
    engines = [
        Engine(model, CONFIGS["roomy"]),
        Engine(model, speculating(CONFIGS["roomy"], 4), model),
    ]
    for kept in (options, {**options, "rules": None}):
        expected, found = (run(engine, **kept) for engine in engines)
        assert [(r.ids, r.finish_reason) for r in found] == [
            (r.ids, r.finish_reason) for r in expected
        ]


def test_drawn_texts_have_the_distribution_of_the_model(model):
    """Chi-square of the second token over 12, after 300 draws with a draft model."""
    engine = Engine(model, speculating(EngineConfig(max_sequence_tokens=8), 1), build(2))
    numbers = [
        engine.add([1, 2], SamplingConfig(num_tokens=3, temperature=1.0), seed=seed)
        for seed in range(300)
    ]
    results = dict(event for event in engine.run() if isinstance(event, tuple))
    with torch.no_grad():
        first = model.logits(model(torch.tensor([[1, 2]]))[0])[-1, 0, :12].softmax(-1)
        texts = torch.tensor([[1, 2, token] for token in range(12)])
        second = model.logits(model(texts)[0])[-1, :, :12].softmax(-1)
    expected = 300 * first @ second
    counts = torch.bincount(torch.tensor([results[n].ids[1] for n in numbers]), minlength=12)
    assert ((counts - expected) ** 2 / expected).sum() < 31.3  # 0.1 % of 11 degrees
    assert 0 < engine.speculation.accepted < engine.speculation.drafted


def test_the_models_own_layer_proposes_what_it_was_trained_to_predict(model):
    engine = Engine(model, speculating(CONFIGS["prompts in chunks"], 2, "mtp"))
    engine.add(PROMPTS[0], SAMPLINGS[0])
    for _ in range(3):
        engine.step()
    (writing,) = engine._sequences.values()
    text = torch.tensor([[*writing.prompt, *writing.ids]])
    (chunk,) = engine._plan().chunks
    assert chunk.num_drafts == 2
    with torch.no_grad():
        hidden, _ = model(text[:, :-1])
        (further,), _ = model.further_hidden(
            hidden, MicroBatch({MTP_TOKENS: text[:, 1:, None]})
        )
        assert chunk.tokens[1] == model.logits(further)[-1, 0, :12].argmax()


def test_proposals_that_nothing_can_make_or_check_are_refused(model):
    config = speculating(CONFIGS["roomy"], 2)
    with pytest.raises(ValueError, match="model needs --draft-load"):
        Engine(model, config)
    with pytest.raises(ValueError, match="ngram uses no draft model"):
        Engine(model, replace(config, speculative_drafts="ngram"), model)
    fewer = replace(model.config, mtp_num_layers=0)
    plain = GPT(fewer, ParallelContext.single(), vocab_size=12, device="meta").eval()
    with pytest.raises(ValueError, match="no multi-token prediction layer"):
        Engine(plain, replace(config, speculative_drafts="mtp"))
    with pytest.raises(ValueError, match="--speculative-drafts model with"):
        InferenceConfig(draft_load="there")
    refused = "--speculative-drafts mtp has no effect without --num-speculative-tokens"
    with pytest.raises(ValueError, match=refused):
        InferenceConfig(speculative_drafts="mtp")
    other = GPT(model.config, ParallelContext.single(), vocab_size=13, device="meta").eval()
    with pytest.raises(ValueError, match="draft model has 13 tokens and the model 12"):
        Engine(model, config, other)
    recurrent = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        hybrid_override_pattern="M",
        mamba_num_groups=1,
        mamba_head_dim=8,
        max_position_embeddings=40,
    )
    other = GPT(recurrent, ParallelContext.single(), vocab_size=12, device="meta").eval()
    with pytest.raises(ValueError, match="draft model with recurrent layers"):
        Engine(model, config, other)
    with pytest.raises(ValueError, match="set --num-speculative-tokens 0"):
        Engine(other, replace(config, speculative_drafts="ngram"))


@pytest.mark.parametrize("drafts", ["", "ngram", "mtp", "model"])
def test_an_engine_that_is_dropped_gives_its_memory_back_at_once(model, drafts):
    """No reference cycle keeps pages until Python looks for cycles."""
    config = CONFIGS["roomy"]
    if drafts:
        config = speculating(config, 2, drafts)
    gc.disable()
    try:
        engine = Engine(model, config, model if drafts == "model" else None)
        engine.add(PROMPTS[0], SAMPLINGS[1])
        if not drafts:
            engine.add(PROMPTS[2], SamplingConfig(num_tokens=3, beam_width=2))
        for _ in range(3):
            engine.step()
        held = engine.cache.layer(0).held.keys
        seen = weakref.ref(engine), weakref.ref(held)
        del engine, held
        assert [one() for one in seen] == [None, None]
    finally:
        gc.enable()
