"""Keys and values in fp8: the engine against one pass whose keys and values are rounded."""

import pytest
import torch

from mcore_infer import Engine, EngineConfig, InferenceConfig, SamplingConfig, build_engine
from mcore_infer.engine.fp8_cache import from_codes, rounded_cache, to_codes
from mcore_infer.engine.limits import Fp8Cache
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_parallel.mesh import ParallelContext

CACHE = Fp8Cache({1: (0.05, 0.02)})
PROMPTS = [[10, 20, 30], [40], list(range(50, 61)), [10, 20, 30, 80, 90], [10, 20, 30]]
LIMITS = {
    "all at once": {"num_pages": 64, "page_tokens": 4},
    "in chunks, and too few pages": {
        "num_pages": 8, "page_tokens": 4, "max_requests": 3, "max_tokens": 4,
    },
}  # fmt: skip


def test_codes_are_to_the_nearest_and_saturate():
    x = torch.tensor([0.0, 1.0, 1.06, 1.07, -300.0, 1e9, 2.0**-9])
    codes = to_codes(x, 0.5)
    want = torch.tensor([0.0, 1.0, 1.0, 1.125, -224.0, 224.0, 2.0**-9])
    want[4] = -224.0  # 448 times the scale
    torch.testing.assert_close(from_codes(codes, 0.5, torch.float64), want.double())


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_requests_write_what_a_pass_with_rounded_keys_and_values_does(model, limits):
    engine = Engine(model, EngineConfig(max_sequence_tokens=40, fp8_cache=CACHE, **limits))
    sampling = SamplingConfig(num_tokens=8, top_k=1)
    numbers = [engine.add(prompt, sampling) for prompt in PROMPTS]
    done = dict(event for event in engine.run() if isinstance(event, tuple))
    assert engine.cache.layer(0).held.keys.dtype == torch.uint8
    worst = 0.0
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        written = done[number].ids
        tokens = torch.tensor([[*prompt, *written]])
        place = torch.arange(len(prompt) - 1, tokens.shape[1] - 1)
        found = []
        for cache in (CACHE, None):
            with torch.no_grad():
                if cache is None:
                    hidden, _ = model(tokens)
                else:
                    with rounded_cache(model, cache):
                        hidden, _ = model(tokens)
                logits = model.logits(hidden[place])[:, 0, : model.vocab_size]
            found.append(logits.log_softmax(-1))
        rounded, plain = found
        assert tuple(rounded.argmax(-1).tolist()) == tuple(written)
        own = rounded.gather(1, torch.tensor(written)[:, None])[:, 0]
        assert done[number].log_probs == pytest.approx(own.tolist(), abs=1e-9)
        worst = max(worst, ((rounded - plain).norm() / plain.norm()).item())
    assert 1e-4 < worst < 0.06  # three bits of fraction, in both layers


def test_a_cache_in_fp8_takes_half_of_sixteen_bits_and_knows_what_it_cannot_keep(model, caplog):
    config = {"inference_max_requests": 2, "inference_dynamic_batching_buffer_size_gb": 1e-3}
    wide = build_engine(model, InferenceConfig(**config))
    narrow = build_engine(model, InferenceConfig(**config, kv_cache_dtype="fp8"))
    pages = [engine.config.num_pages + 1 for engine in (wide, narrow)]
    assert pages[1] == pytest.approx(8 * pages[0], abs=8)  # the model is in float64
    scaled = build_engine(model, InferenceConfig(**config), kv_scales={0: (2.0, 3.0)})
    assert scaled.config.fp8_cache.of(0) == (2.0, 3.0)
    latent = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, multi_latent_attention=True,
        kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8,
    )  # fmt: skip
    own = GPT(latent, ParallelContext.single(), vocab_size=64).eval()
    with pytest.raises(ValueError, match="set --kv-cache-dtype model"):
        build_engine(own, InferenceConfig(**config, kv_cache_dtype="fp8"))
    # A folder has scales: only its own fp8 can be refused, and its use can be turned off.
    with caplog.at_level("WARNING"):
        latent_engine = build_engine(own, InferenceConfig(**config), kv_scales={0: (2.0, 3.0)})
    assert latent_engine.config.fp8_cache is None
    assert "scales of an fp8 cache are not used" in caplog.text
    same = InferenceConfig(**config, kv_cache_dtype="model")
    assert build_engine(model, same, kv_scales={0: (2.0, 3.0)}).config.fp8_cache is None
