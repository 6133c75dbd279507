"""The kernel of decoding against its reference, and steps recorded as graphs, on a GPU."""

import pytest
import torch

from mcore_infer import Engine, EngineConfig, SamplingConfig
from mcore_infer.engine.paged import reference_decode
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_parallel.mesh import ParallelContext

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("N", "G", "H"), [(32, 8, 128), (4, 4, 64), (6, 1, 96)])
@pytest.mark.parametrize("window", [-1, 0, 37])
def test_the_kernel_of_decoding_computes_what_its_reference_does(dtype, N, G, H, window):
    from mcore_infer.engine.kernels import paged_decode

    torch.manual_seed(0)
    lengths = torch.tensor([1, 2, 63, 64, 65, 300, 511], device="cuda")
    tables = torch.randperm(7 * 16, device="cuda").view(7, 16)
    q = torch.randn(7, N, H, device="cuda", dtype=dtype)
    keys, values = torch.randn(2, 7 * 16, 32, G, H, device="cuda", dtype=dtype)
    got = paged_decode(q, keys, values, tables, lengths, window=window)
    want = reference_decode(
        *(t.double() for t in (q, keys, values)), tables, lengths, window=window
    )
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_recorded_steps_write_what_unrecorded_ones_do():
    config = TransformerConfig(
        num_layers=3, hidden_size=128, num_attention_heads=4, num_query_groups=2,
        max_position_embeddings=256, init_method_std=0.1,
    )  # fmt: skip
    model = GPT(config, ParallelContext.single("cuda"), vocab_size=500).eval()
    limits = EngineConfig(max_sequence_tokens=128, page_tokens=16, max_requests=5, num_pages=40)
    sampling = SamplingConfig(num_tokens=40, top_k=1)
    texts = []
    for is_recorded in (True, False):
        engine = Engine(model, limits)
        engine.decoder.is_recorded = is_recorded
        for i in range(7):
            engine.add(list(range(i, 30 + 5 * i)), sampling)
        done = dict(e for e in engine.run() if isinstance(e, tuple))
        texts.append([done[i].ids for i in range(7)])
        torch.cuda.empty_cache()
    assert texts[0] == texts[1]
