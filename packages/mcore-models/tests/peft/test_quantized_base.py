"""A frozen base in few bits computes what its rounded weights compute, forward and backward."""

import pytest
import torch

from mcore_models.config import RecomputeConfig, TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.kernels.few_bits import widen_levels
from mcore_models.layers.layer_setup import Execution
from mcore_models.peft.attaching import adapted_linears, attach_adapters, merge_adapters
from mcore_models.peft.config import PeftConfig
from mcore_models.peft.quantized_base import QuantizedMatrix, quantize_base
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optional_kernels import works
from mcore_parallel.rng import RngStreams


def test_levels_are_those_of_the_paper_and_rounding_is_to_the_nearest():
    matrix = torch.randn(5, 150, generator=torch.Generator().manual_seed(0))
    for bits, size in ((8, 5 * 192), (4, 5 * 96)):
        rounded = QuantizedMatrix(matrix, bits)
        again = QuantizedMatrix(rounded.widened(), bits)
        torch.testing.assert_close(again.widened(), rounded.widened())
        assert rounded.num_bytes == size + 5 * 3 * 4
    levels = QuantizedMatrix(torch.linspace(-1, 1, 64)[None], 4).widened().unique()
    assert len(levels) == 16
    wanted = [-1.0, -0.6961928, -0.5250731, 0.0, 0.0795803, 0.7229568, 1.0]  # of its appendix E
    assert all((levels - level).abs().min() < 1e-6 for level in wanted)
    torch.testing.assert_close(
        QuantizedMatrix(matrix, 8).widened(),
        matrix,
        rtol=0,
        atol=float(matrix.abs().max()) / 254,
    )


def test_a_matrix_that_was_rounded_to_nf4_before_keeps_its_codes():
    """As a base of bitsandbytes, whose blocks of 64 each hold their largest magnitude."""
    random = torch.Generator().manual_seed(0)
    levels = QuantizedMatrix(torch.linspace(-1, 1, 64)[None], 4).widened().unique()
    codes = torch.randint(16, (5, 3, 64), generator=random)
    codes[:, :, 7] = torch.randint(2, (5, 3), generator=random) * 15  # -1 or 1
    factors = torch.rand(5, 3, 1, generator=random) + 0.01
    matrix = (levels[codes] * factors).flatten(1)
    rounded = QuantizedMatrix(matrix, 4)
    assert torch.equal(rounded.widened(), matrix)
    # In bfloat16 the factors are rounded as well: twice half of its last bit.
    narrow = QuantizedMatrix(matrix.bfloat16(), 4)
    assert torch.equal(narrow.codes, rounded.codes)
    torch.testing.assert_close(narrow.widened(), matrix, rtol=2**-8, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_widens_to_the_bits_of_plain_torch(dtype):
    assert works(widen_levels, torch.device("cuda"), dtype)
    for shape in ((4096, 4096), (300, 64 * 33), (77, 150), (1, 2), (5, 63)):
        matrix = QuantizedMatrix(torch.randn(shape, device="cuda"), 4)
        out = torch.full(shape, torch.nan, device="cuda", dtype=dtype)
        matrix.widen_into(out)
        assert torch.equal(out, matrix.widened().to(dtype)), shape


@pytest.mark.parametrize(
    ("kind", "bits", "granularity"), [("lora", 4, ""), ("dora", 8, ""), ("dora", 4, "full")]
)
def test_a_base_in_few_bits_trains_adapters_as_its_rounded_weights_do(kind, bits, granularity):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, init_method_std=0.3
    )
    single = ParallelContext.single()

    def build():
        model = GPT(
            config,
            single,
            execution=Execution(recomputing=RecomputeConfig(recompute_granularity=granularity)),
            vocab_size=13,
            dtype=torch.float64,
            seed=3,
        )
        peft = PeftConfig(peft=kind, lora_dim=2)
        attach_adapters(model, peft, streams=RngStreams(1, single))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(4))
        return model

    rounded, small = build(), build()
    for linear, _ in adapted_linears(rounded):
        linear.weight.data.copy_(QuantizedMatrix(linear.weight.detach(), bits).widened())
    assert len(quantize_base(small, bits)) == 8
    held = [linear.weight.untyped_storage() for linear, _ in adapted_linears(small)]
    assert all(storage.nbytes() == 0 for storage in held)

    def gradients(model):
        tokens = torch.arange(20).view(2, 10) % 13
        weights = torch.full((2, 10), 1 / 20, dtype=torch.float64)
        # Two micro-batches, whose forwards come before their backwards.
        losses = [model.loss(model((tokens + n) % 13)[0], tokens, weights)[0] for n in (0, 1)]
        for loss in losses:
            loss.backward()
        return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    (wanted, expected), (found, got) = gradients(rounded), gradients(small)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=0, msg=name)
    with pytest.raises(ValueError, match="cannot be merged in memory"):
        merge_adapters(small)
    with pytest.raises(ValueError, match="is quantized already"):
        quantize_base(small, bits)
    assert all(storage.nbytes() == 0 for storage in held)
