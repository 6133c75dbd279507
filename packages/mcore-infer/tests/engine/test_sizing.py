"""The size of a cache where no number of pages is given, and requests that do not fit in it."""

from dataclasses import replace

import pytest
import torch

from mcore_infer import Engine, EngineConfig, InferenceConfig, SamplingConfig, build_engine
from mcore_infer.engine.sizing import fitting_pages, largest_step, measured_bytes
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_parallel.mesh import ParallelContext

GIB = 2**30


def texts(engine, prompts, num_tokens):
    sampling = SamplingConfig(num_tokens=num_tokens, top_k=1)
    numbers = [engine.add(prompt, sampling) for prompt in prompts]
    done = dict(event for event in engine.run() if isinstance(event, tuple))
    return [done[number].ids for number in numbers]


def test_engines_of_commands_and_of_python_have_caches_of_one_size(model):
    limits = EngineConfig(max_requests=3, max_sequence_tokens=40, page_tokens=16)
    options = InferenceConfig(
        inference_max_requests=3, inference_dynamic_batching_block_size=16
    )
    assert Engine(model, limits).config.num_pages == 9 == fitting_pages(model, limits)
    assert build_engine(model, options).config.num_pages == 9
    page_bytes, _ = measured_bytes(model, 16)
    assert Engine(model, replace(limits, cache_bytes=6 * page_bytes)).config.num_pages == 5
    with pytest.raises(ValueError, match="does not hold two pages"):
        Engine(model, replace(limits, cache_bytes=page_bytes))


def test_requests_that_do_not_fit_together_wait_and_write_what_they_would_alone(model):
    page_bytes, _ = measured_bytes(model, 4)
    limits = EngineConfig(max_requests=8, max_sequence_tokens=40, page_tokens=4)
    prompts = [[10 * i + 1, 20, 30] for i in range(8)]
    roomy = Engine(model, limits)
    narrow = Engine(model, replace(limits, cache_bytes=12 * page_bytes))
    assert (roomy.config.num_pages, narrow.config.num_pages) == (80, 11)
    assert texts(narrow, prompts, 20) == texts(roomy, prompts, 20)
    assert narrow.scheduler.pool.num_free == 11


def test_the_largest_step_has_most_tokens_of_most_requests_at_the_end_of_long_texts():
    limits = EngineConfig(max_requests=5, max_tokens=64, max_sequence_tokens=40, page_tokens=16)
    for positions, counts in ((0, [40, 21, 1, 1, 1]), (24, [24, 24, 14, 1, 1])):
        step = largest_step(limits, positions)
        assert [len(chunk.tokens) for chunk in step.chunks] == counts
        assert step.num_tokens == 64
        for chunk in step.chunks:
            assert chunk.begin + len(chunk.tokens) == min(40, positions or 40)


@pytest.mark.gpu
def test_a_gpu_that_is_nearly_full_runs_more_requests_than_its_memory_holds():
    """With room for the largest step: of 512 tokens at once, and logits of every request."""
    config = TransformerConfig(
        num_layers=8, hidden_size=1024, num_attention_heads=8, ffn_hidden_size=2048,
        max_position_embeddings=1024,
    )  # fmt: skip
    single = ParallelContext.single("cuda")
    model = GPT(config, single, vocab_size=32000, dtype=torch.bfloat16).eval()
    torch.cuda.empty_cache()
    ballast = torch.empty(
        torch.cuda.mem_get_info()[0] - 2 * GIB, dtype=torch.uint8, device="cuda"
    )
    limits = EngineConfig(max_requests=256, max_tokens=4096, max_sequence_tokens=544)
    engine = Engine(model, limits)
    pages, all_pages = engine.config.num_pages, 256 * 9
    assert all_pages // 8 < pages < all_pages // 2
    prompts = [[i, 2 * i, *range(30)] for i in range(256)]
    found = texts(engine, prompts, 512)
    assert [len(ids) for ids in found] == 256 * [512]
    assert engine.scheduler.pool.num_free == pages
    del engine, ballast
