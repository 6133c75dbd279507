"""Casts and GEMMs in fp8 on a GPU, against their references in torch."""

import pytest
import torch

from mcore_parallel.grad_slot import grad_slot
from mcore_parallel.precision.fp8 import TensorwiseGemm, WeightCasts, multiply
from mcore_parallel.precision.fp8_cast import cast, cast_plain, dequantized
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDED = 1.6e-2
"""Of a bfloat16 result against the same fp8 factors multiplied in float32."""


def bits(x):
    return x.view(torch.uint8) if x.element_size() == 1 else x.view(torch.int32)


def distance(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("narrow", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 16), (130, 257), (8192, 4096), (4096, 28672)])
def test_the_kernels_cast_to_the_same_bits_as_torch(shape, dtype, narrow):
    torch.manual_seed(0)
    x = 3e-3 * torch.randn(shape, device="cuda").to(dtype)
    x[0, :3] = torch.tensor([0.0, -5e-2, 1e-20])
    want = cast_plain(x, x.abs().max().float().view(1), narrow)
    for a, b in zip(cast(x, narrow), want, strict=True):
        assert torch.equal(bits(a), bits(b))
    only_columns = cast(x, narrow, has_rows=False)
    assert only_columns.rows.numel() == 0
    assert torch.equal(bits(only_columns.columns), bits(want.columns))


def test_zeros_stay_zero_and_what_is_not_finite_makes_the_scale_nan():
    zeros = cast(torch.zeros(32, 32, device="cuda"), E4M3)
    assert not dequantized(zeros.rows, zeros.scale_inv).any()
    for strange in (float("inf"), float("nan")):
        x = torch.ones(32, 32, device="cuda")
        x[3, 5] = strange
        assert cast(x, E5M2).scale_inv.isnan().all()


@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2])
def test_the_three_gemms_are_those_of_the_dequantized_factors(grad_dtype):
    torch.manual_seed(0)
    T, D, F = 2048, 1024, 1536
    gemm = TensorwiseGemm(grad_dtype=grad_dtype)
    x, weight, dy = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((T, 1, D), (F, D), (T, 1, F))
    )
    y, kept = gemm.forward(x, weight, None)
    grad = gemm.prepare(dy)
    dx, dw = gemm.input_grad(grad, weight), gemm.weight_grad(grad, kept, None)
    x8, w8, dy8 = (
        cast(x.flatten(0, 1), E4M3),
        cast(weight, E4M3),
        cast(dy.flatten(0, 1), grad_dtype),
    )
    x8, w8, dy8 = (dequantized(each.rows, each.scale_inv) for each in (x8, w8, dy8))
    assert distance(y.flatten(0, 1), x8 @ w8.t()) < ROUNDED
    assert distance(dx.flatten(0, 1), dy8 @ w8) < ROUNDED
    assert distance(dw, dy8.t() @ x8) < 1e-3
    assert y.dtype == dx.dtype == torch.bfloat16
    exact = x.flatten(0, 1).float() @ weight.float().t()
    assert 0.01 < distance(y.flatten(0, 1), exact) < 0.05


@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_written_over_a_stale_main_gradient_and_added_to_others(main):
    torch.manual_seed(0)
    gemm = TensorwiseGemm(grad_dtype=E5M2)
    layer = ColumnParallelLinear(256, 512, gemm=gemm, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(64, 2, n, device="cuda", dtype=torch.bfloat16) for n in (256, 512))
    layer(x).backward(dy)
    want, layer.weight.grad = layer.weight.grad, None
    slot = grad_slot(layer.weight)
    slot.main, slot.is_stale = torch.full((512, 256), 7.0, device="cuda", dtype=main), True
    for times in (1, 2):
        layer(x).backward(dy)
        assert layer.weight.grad is None
        assert distance(slot.main, times * want) < ROUNDED


def test_kept_casts_of_weights_change_no_bit():
    torch.manual_seed(0)
    casts = WeightCasts()
    gemm = TensorwiseGemm(grad_dtype=E5M2, casts=casts)
    layer = ColumnParallelLinear(256, 512, gemm=gemm, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 2, 256, device="cuda", dtype=torch.bfloat16)
    want = layer(x)
    with casts.keeping():
        assert torch.equal(layer(x), want)
        assert torch.equal(layer(x), want)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer(x), 2 * want)


def test_a_product_of_two_gradients_is_refused_by_the_hardware_not_computed_wrongly():
    a, b = (cast(torch.randn(32, 32, device="cuda"), E5M2) for _ in range(2))
    with pytest.raises((RuntimeError, ValueError)):
        multiply(a.rows, b.rows, a.scale_inv, b.scale_inv, torch.bfloat16)
