"""The kernel of decoding against its reference, and steps recorded as graphs, on a GPU."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from mcore_infer import Engine, EngineConfig, SamplingConfig
from mcore_infer.engine.fp8_cache import to_codes
from mcore_infer.engine.plain_attention import reference_decode, write_to_pages
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_moe import MoEConfig
from mcore_parallel.mesh import ParallelContext

pytestmark = pytest.mark.gpu


PLAIN = [{}, {"window": 0}, {"window": 37}]
RULES = [*PLAIN, {"chunk": 48, "softcap": 3.0}, {"sinks": True, "window": 100}]


@pytest.mark.parametrize(
    ("kind", "rules"),
    [*product(("float32", "bfloat16"), RULES), *product(("many",), PLAIN)],
)
@pytest.mark.parametrize(("N", "G", "H"), [(32, 8, 128), (4, 4, 64), (6, 1, 96)])
@pytest.mark.parametrize("scales", [None, (0.02, 1.0)])
def test_the_kernels_of_decoding_compute_what_their_reference_does(
    kind, rules, N, G, H, scales
):
    from mcore_infer.engine.kernels.paged_attention import paged_decode
    from mcore_infer.engine.kernels.paged_attention_many import decode_many

    decode = decode_many if kind == "many" else paged_decode
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    torch.manual_seed(0)
    lengths = torch.tensor([1, 2, 63, 64, 65, 300, 511], device="cuda")
    tables = torch.randperm(7 * 16, device="cuda").view(7, 16)
    q = torch.randn(7, N, H, device="cuda", dtype=dtype)
    k, v = torch.randn(7, 2 * G, H, device="cuda", dtype=dtype).split(G, dim=1)
    keys, values = torch.randn(2, 7 * 16, 32, G, H, device="cuda", dtype=dtype)
    if scales:
        keys, values = (to_codes(t, s) for t, s in zip((keys, values), scales, strict=True))
    places = tables[range(7), (lengths - 1) // 32] * 32 + (lengths - 1) % 32
    memories = keys.clone(), values.clone()
    write_to_pages(memories, (k, v), places, scales)
    sinks = {"sinks": torch.rand(N, device="cuda")} if "sinks" in rules else {}
    rules = {**rules, **sinks, "kv_scales": scales}
    got = decode(q, k, v, keys, values, tables, lengths, **rules)
    torch.testing.assert_close((keys, values), memories, rtol=0, atol=0)
    if not scales:
        memories = [memory.double() for memory in memories]
    want = reference_decode(q.double(), *memories, tables, lengths, **rules)
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5)


LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 0,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("N", "J", "rows"), [(16, 512, 7), (128, 512, 3), (6, 96, 40)])
def test_the_kernel_of_latent_decoding_computes_what_its_reference_does(dtype, N, J, rows):
    from mcore_infer.engine.kernels.latent_attention import latent_decode

    torch.manual_seed(0)
    lengths = torch.tensor([1, 2, 63, 64, 65, 300, 511], device="cuda").repeat(6)[:rows]
    tables = torch.randint(100, (rows, 16), device="cuda")
    q = torch.randn(rows, N, J + 64, device="cuda", dtype=dtype)
    keys = torch.randn(100, 32, 1, J + 64, device="cuda", dtype=dtype)
    got = latent_decode(q, keys, tables, lengths, J)
    wide = keys.double()
    want = reference_decode(q.double(), wide, wide[..., :J], tables, lengths)
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("features", "channels"), [(40, 72), (6144, 4096), (4096, 14336)])
def test_the_gemm_of_a_few_rows_multiplies(rows, features, channels):
    from mcore_infer.engine.kernels.skinny_gemm import few_rows_linear

    torch.manual_seed(0)
    x = torch.randn(rows, 1, channels, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(features, channels, device="cuda", dtype=torch.bfloat16)
    want = x.double() @ weight.double().t()
    error = (few_rows_linear(x, weight).double() - want).abs().max() / want.abs().max()
    assert error < 4e-3  # half a unit in the last place of bfloat16


HYBRID = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "mamba_num_groups": 1,
    "mamba_state_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}


@pytest.mark.parametrize(
    ("pattern", "num_drafts", "changes"),
    [("", 0, {}), ("", 3, {}), ("M*-M*-", 0, HYBRID), ("M-G-*-", 0, HYBRID), ("", 0, LATENT)],
)
def test_recorded_steps_write_what_unrecorded_ones_do(pattern, num_drafts, changes):
    """Dense, with proposals of the text, with recurrent states, and with latent attention."""
    config = TransformerConfig(
        num_layers=6 if pattern else 3, hidden_size=128, num_attention_heads=4,
        max_position_embeddings=256, init_method_std=0.1, hybrid_override_pattern=pattern,
        **{"num_query_groups": 2, **changes},
    )  # fmt: skip
    model = GPT(config, ParallelContext.single("cuda"), vocab_size=500).eval()
    limits = EngineConfig(max_sequence_tokens=128, page_tokens=16, max_requests=5, num_pages=40)
    sampling = SamplingConfig(num_tokens=40, top_k=1)
    texts = []
    for is_recorded in (True, False):
        drafts = num_drafts if is_recorded else 0
        engine = Engine(model, replace(limits, num_speculative_tokens=drafts))
        engine.decoder.is_recorded = is_recorded
        engine.runs_ahead = is_recorded and not drafts
        for i in range(7):
            engine.add(list(range(i, 30 + 5 * i)), sampling)
        done = dict(e for e in engine.run() if isinstance(e, tuple))
        texts.append([done[i].ids for i in range(7)])
        assert not engine.cache.is_padded
        assert bool(engine.speculation.accepted) == bool(drafts)
        torch.cuda.empty_cache()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("dtype", "needs_sizes"), [(torch.bfloat16, False), (torch.float32, True)]
)
def test_steps_of_experts_are_recorded_where_their_gemm_needs_no_sizes(
    dtype, needs_sizes, caplog
):
    config = TransformerConfig(
        num_layers=3, hidden_size=128, num_attention_heads=4, num_query_groups=2,
        max_position_embeddings=256, init_method_std=0.1,
    )  # fmt: skip
    moe = MoEConfig(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=64)
    ctx = ParallelContext.single("cuda")
    model = GPT(config, ctx, vocab_size=500, moe=moe, dtype=dtype).eval()
    limits = EngineConfig(max_sequence_tokens=128, page_tokens=16, max_requests=8, num_pages=70)
    texts = []
    for is_recorded in (True, False):
        engine = Engine(model, limits)
        engine.decoder.is_recorded = is_recorded
        for i in range(8):
            engine.add(list(range(i, 20 + 9 * i)), SamplingConfig(num_tokens=40, top_k=1))
        texts.append(text_of(engine))
        assert engine.decoder.recorder.gave_up == (is_recorded and needs_sizes)
    assert ("a forward waits for the device" in caplog.text) == needs_sizes
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_prompts_and_single_tokens_writes_what_requests_alone_do(dtype):
    config = TransformerConfig(
        num_layers=2, hidden_size=128, num_attention_heads=4, num_query_groups=2,
        max_position_embeddings=256, init_method_std=0.3,
    )  # fmt: skip
    model = GPT(config, ParallelContext.single("cuda"), vocab_size=500, dtype=dtype).eval()
    limits = EngineConfig(
        max_sequence_tokens=128, page_tokens=16, max_requests=4, max_tokens=24, num_pages=40
    )
    prompts = [list(range(3 * i, 3 * i + n)) for i, n in enumerate((5, 40, 1, 70))]
    sampling = SamplingConfig(num_tokens=30, top_k=1)
    together, alone = Engine(model, limits), []
    for prompt in prompts:  # each reads beside those that write
        together.add(prompt, sampling)
        for _ in range(3):
            together.step()
        one = Engine(model, limits)
        one.add(prompt, sampling)
        alone.append(text_of(one)[0])
    if dtype == torch.float32:
        assert text_of(together) == alone
    else:  # a rounding may turn one text, and not what follows from pages that are wrong
        equal = [a == b for a, b in zip(text_of(together), alone, strict=True)]
        assert sum(equal) >= 3


def text_of(engine):
    done = dict(event for event in engine.run() if isinstance(event, tuple))
    return [done[number].ids for number in sorted(done)]
