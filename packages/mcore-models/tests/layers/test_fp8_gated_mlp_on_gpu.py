"""The gated activation between fp8 linears on a GPU: the kernel against its reference."""

import pytest
import torch

from mcore_models.kernels.gated_fp8 import cast_gated
from mcore_models.layers.fp8_gated_mlp import Fp8GatedMLP, GatedCast
from mcore_models.layers.mlp import MLP
from mcore_parallel import optional_kernels
from mcore_parallel.kernels.fp8_cast import cast_plain
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optional_kernels import kernel_failure
from mcore_parallel.precision.config import Fp8Config
from mcore_parallel.precision.fp8 import WeightCasts, delayed_scales, fp8_gemms
from mcore_parallel.precision.fp8_recipes import Delayed

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("shape", [(16, 16), (132, 208), (4096, 14336)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_kernel_casts_what_the_16_bit_kernels_compute(shape, activation):
    torch.manual_seed(0)
    tokens, width = shape
    x = 2.0 * torch.randn(tokens, 2 * width, device="cuda", dtype=torch.bfloat16)
    dy = 1e-3 * torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    for grad, narrow in ((None, E4M3), (dy, E5M2), (dy, E4M3)):
        made = GatedCast(x, grad, activation)
        assert made._fits()
        matrix = made.make()
        amax = matrix.abs().max().float().view(1)
        # The same formula; two compilations may round a last bit of 16 differently.
        torch.testing.assert_close(made.largest(), amax, rtol=2**-7, atol=0)
        for scale, seen in ((amax, None), (amax / 3, amax / 4)):
            want = cast_plain(matrix, scale, narrow)
            got = made.cast(scale, narrow, has_rows=True, seen=seen)
            assert torch.equal(got.scale_inv, want.scale_inv)
            for a, b in zip(got[:2], want[:2], strict=True):
                same = (a.view(torch.uint8) == b.view(torch.uint8)).double().mean().item()
                assert same > 0.995, same
                torch.testing.assert_close(a.float(), b.float(), rtol=0.26, atol=2**-8)
            if seen is not None:
                torch.testing.assert_close(seen, amax, rtol=2**-7, atol=0)
            assert made.cast(scale, narrow, has_rows=False, seen=None).rows.numel() == 0


def test_what_is_not_finite_is_nan_in_the_output_and_its_neighbours():
    x = torch.ones(256, 512, device="cuda", dtype=torch.bfloat16)
    x[3, 5] = float("inf")
    made, amax = GatedCast(x, None, "silu"), torch.ones(1, device="cuda")
    assert not made.largest().isfinite().any()
    rows = made.cast(amax, E4M3, has_rows=True, seen=torch.zeros(1, device="cuda")).rows.float()
    assert rows[3, 5].isnan()
    assert not rows[128:].isnan().any()


def test_a_layer_in_16_bits_does_not_try_the_kernel():
    before = set(optional_kernels._FAILURES)
    layer = MLP(64, 48, device="cuda", dtype=torch.bfloat16)
    layer(torch.randn(16, 2, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
    tried = set(optional_kernels._FAILURES) - before
    assert not [kernel for kernel, *_ in tried if kernel is cast_gated]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_layer_computes_what_it_computes_by_single_kernels(recipe):
    device = torch.device("cuda")
    assert kernel_failure(cast_gated, device, torch.bfloat16) == ""
    config, ctx = (
        Fp8Config(fp8_format="hybrid", fp8_recipe=recipe),
        ParallelContext.single(device),
    )
    found = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        scales = delayed_scales(config, ctx)
        own = None if scales is None else Delayed(scales, "layer")
        gemms = fp8_gemms(config, ctx, WeightCasts(), own)
        kind = Fp8GatedMLP if is_fused else MLP
        layer = kind(512, 768, gemms=gemms, device=device, dtype=torch.bfloat16)
        grads = []
        for _ in range(2):
            x = torch.randn(
                256, 2, 512, device=device, dtype=torch.bfloat16, requires_grad=True
            )
            if scales is None:
                y = layer(x)
                y.backward(torch.cos(y.detach()))
            else:
                with scales.noting():
                    y = layer(x)
                    y.backward(torch.cos(y.detach()))
                scales.move_on()
            grads += [y.detach(), x.grad]
        found.append([*grads, layer.fc1.weight.grad, layer.fc2.weight.grad])
    for plain, fused in zip(*found, strict=True):
        distance = (plain.double() - fused.double()).norm() / plain.double().norm()
        assert distance < 5e-3, distance
