"""Kernels of quantized weights against their references, and packed models, on a GPU."""

import pytest
import torch

from mcore_ckpt.formats.quantized_layouts import LAYOUTS
from mcore_infer import Engine, EngineConfig, SamplingConfig
from mcore_infer.engine.kernels.skinny_gemm_tiles import tiles_for
from mcore_infer.engine.limits import Fp8Cache
from mcore_infer.quantization.gated_mlp import RoundedGatedMLP
from mcore_infer.quantization.gemms import InputRounding, QuantizedGemm
from mcore_infer.quantization.loading import linears, round_to_nearest_
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_moe.kernels.gate import gated
from mcore_parallel.mesh import ParallelContext

pytestmark = pytest.mark.gpu


def relative(got, want):
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


@pytest.mark.parametrize("algo", LAYOUTS)
@pytest.mark.parametrize("shape", [(256, 512), (1040, 4096)])
def test_products_with_codes_are_those_with_the_numbers_they_stand_for(algo, shape):
    from mcore_infer.engine.kernels.skinny_gemm import few_rows_linear
    from mcore_infer.quantization.kernels import widened

    torch.manual_seed(0)
    layout = LAYOUTS[algo]
    weight = torch.randn(shape, device="cuda") * torch.randn(shape[0], 1, device="cuda").exp()
    scales = layout.scales(weight)
    packed = layout.packed(layout.quantized(weight, scales))
    want, wide = layout.dequantized(packed, scales), layout.wide_scales(scales)
    kind = (packed, wide, layout.code, layout.group)
    assert relative(widened(*kind, torch.bfloat16), want) < 2**-8
    for num_rows in (1, 16, 17, 64):
        x = torch.randn(num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
        exact = x.double() @ want.double().t()
        for tile in tiles_for(num_rows, layout.code, tuple(packed.shape))[: 9 // num_rows or 1]:
            found = few_rows_linear(
                x, packed, wide, code=layout.code, group=layout.group, tile=tile
            )
            assert relative(found, exact) < 1e-2, tile
    code = layout.inputs if layout.inputs != "e2m1" else ""
    scale = torch.tensor(0.02, device="cuda") if layout.input_scale and code else None
    rounding = InputRounding(code, scale)
    gemm = QuantizedGemm(layout, packed, wide, layout.group, rounding)
    # Inputs keep their digits up to a number of rows, whatever was measured to be faster.
    for num_rows in (1, 5, 16, 17, 32, 33, 64, 65, 300):
        x = torch.randn(num_rows, 1, shape[1], device="cuda", dtype=torch.bfloat16)
        y, _ = gemm.forward(x, torch.empty(0), None)
        inputs = x.flatten(0, 1)
        inputs = inputs if gemm.keeps_digits(num_rows) else rounding.rounded(inputs)
        assert relative(y.flatten(0, 1), inputs.double() @ want.double().t()) < 1e-2


@pytest.mark.parametrize(
    "algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A16", "W8A8_SQ_PER_CHANNEL", "W4A16_AWQ"]
)
def test_recorded_steps_of_a_packed_model_are_as_near_to_float32_as_unrecorded_ones(algo):
    """Compare logits of the same tokens, step by step, with those of a float32 model.

    A recorded step may be one kernel (``whole_step``), which sums in another order, so the two
    bfloat16 results differ by as much as each differs from float32: 1 to 4 % here, since
    weights are drawn with a standard deviation of 0.1. The prompts have 15 tokens in all:
    few enough that no step rounds its inputs, which float32 would round to other codes.
    """
    config = TransformerConfig(
        num_layers=2, hidden_size=256, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=512, max_position_embeddings=256, init_method_std=0.1,
    )  # fmt: skip
    single = ParallelContext.single("cuda")
    model = GPT(config, single, vocab_size=500, dtype=torch.bfloat16).eval()
    exact = GPT(config, single, vocab_size=500, dtype=torch.float32).eval()
    exact.load_state_dict(model.state_dict())
    for each in (model, exact):
        round_to_nearest_(each, LAYOUTS[algo])
        assert all(isinstance(m.gemm, QuantizedGemm) for m in linears(each).values())
    cache = Fp8Cache({1: (0.02, 0.01)}) if algo == "FP8" else None
    limits = EngineConfig(
        max_sequence_tokens=128, page_tokens=16, max_requests=5, num_pages=40, fp8_cache=cache
    )
    recorded, tokens = scores_of_steps(Engine(model, limits))
    unrecorded, _ = scores_of_steps(Engine(model, limits), tokens, is_recorded=False)
    reference, _ = scores_of_steps(Engine(exact, limits), tokens, is_recorded=False)
    error, usual = relative_errors(recorded, reference), relative_errors(unrecorded, reference)
    print(algo, "recorded", error.mean(), error.max(), "unrecorded", usual.mean(), usual.max())
    assert 0.001 < usual.mean() < 0.03 or algo == "FP8"  # whose cache rounds keys and values
    assert error.mean() < 1.2 * usual.mean()
    assert error.max() < 1.5 * usual.max()


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A8_SQ_PER_CHANNEL"])
def test_gates_are_rounded_to_the_codes_of_the_activation(algo):
    """In one kernel, for numbers of rows that tensor cores take or that are padded."""
    config = TransformerConfig(
        num_layers=1, hidden_size=256, num_attention_heads=4, ffn_hidden_size=1104,
        max_position_embeddings=256, init_method_std=0.1,
    )  # fmt: skip
    single = ParallelContext.single("cuda")
    model = GPT(config, single, vocab_size=500, dtype=torch.bfloat16).eval()
    round_to_nearest_(model, LAYOUTS[algo])
    mlp = model.blocks["0"].mlp
    assert isinstance(mlp, RoundedGatedMLP)
    for num_rows in (1, 65, 300):
        x = torch.randn(num_rows, 1, 256, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            hidden = mlp.fc1(x)
            assert mlp.fc2.gemm.takes_gated(hidden, mlp.network.activation) == (num_rows > 1)
            assert torch.equal(mlp(x), mlp.fc2(gated(hidden, mlp.network.activation)))


def scores_of_steps(engine, tokens=None, *, is_recorded=True):
    """Let five requests write 30 tokens; return logits ``[29, 5, V]`` and tokens ``[30, 5]``.

    ``tokens``, where given, are fed in place of those that the engine chooses.
    """
    scores, written = [], {}
    engine.decoder.is_recorded &= is_recorded
    run = engine.decoder.run

    def forced(step, chosen=None):
        fed = chosen if tokens is None else tokens[len(scores)]
        hidden, logits = run(step, fed)
        scores.append(logits.clone())
        return hidden, logits

    engine.decoder.run = forced
    for i in range(5):
        engine.add([i, i + 1, i + 2], SamplingConfig(num_tokens=30, top_k=1))
    for event in engine.run():
        if isinstance(event, tuple):
            written[event[0]] = list(event[1].ids)
    assert len(scores) == 29
    return torch.stack(scores), torch.tensor([written[k] for k in sorted(written)]).t().cuda()


def relative_errors(scores, reference):
    """Return the error of each row of logits over the norm of its reference."""
    error = (scores.double() - reference.double()).norm(dim=-1)
    return error / reference.double().norm(dim=-1)
