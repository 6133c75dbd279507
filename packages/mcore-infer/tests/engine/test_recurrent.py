"""Models with a recurrent state in the engine, against writing one prompt alone."""

from dataclasses import replace

import pytest
import torch

from mcore_infer import (
    Engine,
    EngineConfig,
    InferenceConfig,
    SamplingConfig,
    build_engine,
    generate,
)
from mcore_infer.engine.sizing import measured_bytes
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_parallel.mesh import ParallelContext

# Mamba-2, both side by side, gated delta net, attention, feed-forward.
SIZES = TransformerConfig(
    num_layers=5,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    max_position_embeddings=40,
    init_method_std=0.3,
    hybrid_override_pattern="M*G*-",
    mamba_num_heads=4,
    mamba_head_dim=6,
    mamba_num_groups=1,
    mamba_state_dim=5,
    mamba_chunk_size=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=4,
    linear_value_head_dim=6,
)
PROMPTS = [[10, 20, 30], [40], [10, 20, 30, 8, 9, 1, 11, 12, 13], [7] * 5, [10, 20, 30]]
SAMPLINGS = [
    SamplingConfig(num_tokens=n, top_k=k) for n, k in ((8, 1), (11, 0), (3, 5), (8, 0))
]
SAMPLINGS.append(SamplingConfig(num_tokens=8, repetition_penalty=1.3))
CONFIGS = {
    "prompts in chunks": EngineConfig(
        max_sequence_tokens=40, num_pages=64, page_tokens=2, max_requests=3, max_tokens=4
    ),
    "too few pages": EngineConfig(
        max_sequence_tokens=40, num_pages=10, page_tokens=2, max_requests=4, max_tokens=8
    ),
}


def build(config):
    ctx = ParallelContext.single()
    return GPT(config, ctx, vocab_size=64, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def hybrid():
    return build(SIZES)


def run(engine):
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.add(prompt, sampling, seed=3 + i)
    results = dict(event for event in engine.run() if isinstance(event, tuple))
    return [results[number] for number in sorted(results)]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_requests_of_a_hybrid_write_together_what_each_would_alone(hybrid, config):
    """Twice in the same slots, the second time with steps that start ahead."""
    expected = [
        generate(hybrid, [prompt], sampling, seed=3 + i)[0]
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]
    engine = Engine(hybrid, config)
    assert not engine.config.prefix_cache
    for runs_ahead in (False, True):
        engine.runs_ahead = runs_ahead
        for result, other in zip(run(engine), expected, strict=True):
            assert result.ids == other.ids
            assert result.log_probs == pytest.approx(other.log_probs, abs=1e-9)
    assert engine.scheduler.pool.num_free == engine.config.num_pages


def test_the_state_of_an_earlier_request_is_never_read(hybrid):
    engine = Engine(hybrid, CONFIGS["prompts in chunks"])
    expected = [result.ids for result in run(engine)]
    for number in range(SIZES.num_layers):
        for states in engine.cache.layer(number).held.states:
            states.fill_(torch.nan)
    assert [result.ids for result in run(engine)] == expected


def test_memory_is_counted_for_states_and_a_model_without_attention_runs(hybrid):
    page_bytes, slot_bytes = measured_bytes(hybrid, 4)
    engine = build_engine(hybrid, InferenceConfig(inference_max_requests=3))
    run(engine)
    assert engine.cache.num_state_bytes == slot_bytes * 4
    room = (4 * slot_bytes + 3 * page_bytes) / 2**30
    sizes = {"inference_max_requests": 3, "inference_dynamic_batching_block_size": 4}
    for share, pages in ((1, 2), (0.9, 0)):
        config = InferenceConfig(
            **sizes, inference_dynamic_batching_buffer_size_gb=room * share
        )
        if pages:
            assert build_engine(hybrid, config).config.num_pages == pages
            continue
        with pytest.raises(ValueError, match=r"of recurrent states: raise .* or lower"):
            build_engine(hybrid, config)
    pure = build(replace(SIZES, num_layers=2, hybrid_override_pattern="MM"))
    engine = build_engine(pure, InferenceConfig(inference_max_requests=3))
    assert run(engine)[0].ids == generate(pure, [PROMPTS[0]], SAMPLINGS[0])[0].ids
