"""Casts and GEMMs in fp8 on a GPU, against their references in torch."""

import pytest
import torch

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.kernels.fp8_cast import (
    cast_by,
    cast_plain,
    dequantized,
    largest_magnitude,
)
from mcore_parallel.kernels.fp8_fine_cast import (
    cast_blocks,
    cast_lines_by,
    dequantized_lines,
)
from mcore_parallel.optional_kernels import kernel_failure
from mcore_parallel.precision.delayed_scaling import DelayedScales
from mcore_parallel.precision.fp8 import Fp8Gemm, WeightCasts
from mcore_parallel.precision.fp8_accumulation import add_scaled_matmul
from mcore_parallel.precision.fp8_cast import cast, cast_lines
from mcore_parallel.precision.fp8_recipes import (
    Blockwise,
    Cut,
    Delayed,
    Factor,
    Rowwise,
    Tensorwise,
)
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDED = 1.6e-2
"""Of a bfloat16 result against the same fp8 factors multiplied in float32."""


def bits(x):
    return x.view(torch.uint8) if x.element_size() == 1 else x.view(torch.int32)


def distance(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def same_bits(got, want):
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


def test_no_kernel_is_refused_by_its_trial():
    cuda = torch.device("cuda")
    for dtype in (torch.bfloat16, torch.float32):
        for kernel in (largest_magnitude, cast_by):
            assert kernel_failure(kernel, cuda, dtype) == ""
        for grad_dtype in (E4M3, E5M2):
            assert kernel_failure(add_scaled_matmul, cuda, dtype, grad_dtype) == ""
    for kernel in (cast_lines_by, cast_blocks):
        assert kernel_failure(kernel, cuda, torch.bfloat16) == ""


@pytest.mark.parametrize("narrow", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 16), (132, 257), (160, 272), (8192, 4096)])
def test_the_kernels_cast_to_the_same_bits_as_torch(shape, dtype, narrow):
    torch.manual_seed(0)
    x = 3e-3 * torch.randn(shape, device="cuda").to(dtype)
    x[0, :3] = torch.tensor([0.0, -5e-2, 1e-20])
    amax = x.abs().max().float().view(1)
    want = cast_plain(x, amax, narrow)
    assert torch.equal(largest_magnitude.launch(x), amax)
    assert same_bits(cast_by.launch(x, amax, narrow), want)
    only_columns = cast_by.launch(x, amax, narrow, has_rows=False)
    assert only_columns[0].numel() == 0
    assert torch.equal(bits(only_columns[1]), bits(want.columns))
    earlier, seen = amax / 3, amax / 2
    assert same_bits(
        cast_by.launch(x, earlier, narrow, seen=seen), cast_plain(x, earlier, narrow)
    )
    assert torch.equal(seen, amax)


def test_what_is_not_finite_is_nan_under_an_earlier_scale_too():
    x = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    x[3, 5], x[4, 6] = float("inf"), float("nan")
    for narrow in (E4M3, E5M2):
        seen = torch.zeros(1, device="cuda")
        rows, columns, _ = cast_by.launch(x, torch.ones(1, device="cuda"), narrow, seen=seen)
        for lost in (rows.float().isnan(), columns.t().float().isnan()):
            assert lost[3, 5]
            assert lost[4, 6]
            assert not lost[128:].any()  # another tile
            assert not lost[:, 128:].any()
        assert seen.isnan().all()


@pytest.mark.parametrize("narrow", [E4M3, E5M2])
@pytest.mark.parametrize("strange", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("shape", [(128, 256), (384, 640)])
def test_casts_with_many_scales_have_the_same_bits_as_torch(shape, strange, narrow):
    torch.manual_seed(0)
    x = 3e-3 * torch.randn(shape, device="cuda").bfloat16()
    x[:, 3] *= 50
    x[:128, :128] = 0
    x[-1, -1] = strange
    tops = x.abs().amax(1).float(), x.abs().amax(0).float()
    pairs = [(cast_lines(x, narrow), cast_lines_by.reference(x, *tops, narrow))]
    for is_square in (False, True):
        got = cast_blocks(x, narrow, is_square=is_square)
        pairs.append((got, cast_blocks.reference(x, narrow, is_square=is_square)))
    for got, want in pairs:
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


def test_zeros_stay_zero_and_what_is_not_finite_makes_the_scale_nan():
    zeros = cast(torch.zeros(32, 32, device="cuda"), E4M3)
    assert not dequantized(zeros.rows, zeros.scale_inv).any()
    for strange in (float("inf"), float("nan")):
        x = torch.ones(32, 32, device="cuda")
        x[3, 5] = strange
        assert cast(x, E5M2).scale_inv.isnan().all()
        for narrow in (E4M3, E5M2):
            own, want = (
                cast_by.launch(x, largest_magnitude.launch(x), narrow),
                cast_plain(x, x.abs().amax().view(1), narrow),
            )
            assert all(a.float().isnan().all() for a in (*own, *want))


def factors(recipe, operand, x, narrow):
    own = recipe.cast(operand, x, narrow, Cut())
    restored = dequantized if own.rows.scales.numel() == 1 else dequantized_lines
    return restored(*own.rows), restored(*own.columns)


@pytest.mark.parametrize(
    ("recipe", "grad_dtype"),
    [
        (Tensorwise(), E4M3),
        (Tensorwise(), E5M2),
        (Rowwise(), E4M3),
        (Rowwise(), E5M2),
        (Blockwise(), E4M3),
    ],
)
def test_the_three_gemms_are_those_of_the_dequantized_factors(recipe, grad_dtype):
    torch.manual_seed(0)
    T, D, F = 2048, 1152, 1536  # 1152 has 9 blocks, which the GEMM wants padded to 12
    gemm = Fp8Gemm(grad_dtype=grad_dtype, recipe=recipe)
    x, weight, dy = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((T, 1, D), (F, D), (T, 1, F))
    )
    y, kept = gemm.forward(x, weight, None)
    grad = gemm.prepare(dy)
    dx, dw = gemm.input_grad(grad, weight), gemm.weight_grad(grad, kept, None)
    x8, x8t = factors(recipe, "x", x.flatten(0, 1), E4M3)
    w8, w8t = factors(recipe, "weight", weight, E4M3)
    dy8, dy8t = factors(recipe, "grad", dy.flatten(0, 1), grad_dtype)
    assert distance(y.flatten(0, 1), x8 @ w8.t()) < ROUNDED
    assert distance(dx.flatten(0, 1), dy8 @ w8t.t()) < ROUNDED
    assert distance(dw, dy8t @ x8t.t()) < ROUNDED
    assert y.dtype == dx.dtype == torch.bfloat16
    exact = x.flatten(0, 1).float() @ weight.float().t()
    assert 0.01 < distance(y.flatten(0, 1), exact) < 0.05


@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2])
def test_the_gemm_that_adds_adds_what_the_other_writes(grad_dtype, main):
    torch.manual_seed(0)
    a = cast(torch.randn(512, 2048, device="cuda"), grad_dtype)
    b = cast(torch.randn(256, 2048, device="cuda"), E4M3)
    product = Tensorwise().multiply(
        Factor(a.rows, a.scale_inv), Factor(b.rows, b.scale_inv), torch.float32
    )
    memory = torch.zeros(512 * 256 + 8, device="cuda", dtype=main)
    for start in (0, 16 // memory.element_size()):  # aligned as cublasLt likes it, and less
        total = memory[start : start + 512 * 256].view(512, 256).fill_(3.0)
        for times in (1, 2):
            add_scaled_matmul(total, a.rows, b.rows, a.scale_inv, b.scale_inv)
            assert distance(total, 3.0 + times * product) < (
                1e-5 if main == torch.float32 else ROUNDED
            )


def test_scales_of_earlier_steps_give_the_products_of_current_ones_where_nothing_changed():
    torch.manual_seed(0)
    scales = DelayedScales(2, takes_max=True, device="cuda")
    gemm = Fp8Gemm(grad_dtype=E5M2, recipe=Delayed(scales, "layer"))
    layer = ColumnParallelLinear(256, 512, gemm=gemm, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(64, 2, n, device="cuda", dtype=torch.bfloat16) for n in (256, 512))
    found = []
    for _ in range(2):
        leaf, layer.weight.grad = x.clone().requires_grad_(), None
        with scales.noting():
            y = layer(leaf)
            y.backward(dy)
        scales.move_on()
        found.append((y.detach(), leaf.grad, layer.weight.grad))
    assert not scales.is_fresh
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_written_over_a_stale_main_gradient_and_added_to_others(main):
    torch.manual_seed(0)
    gemm = Fp8Gemm(grad_dtype=E5M2)
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
    gemm = Fp8Gemm(grad_dtype=E5M2, casts=casts)
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
        Tensorwise().multiply(
            Factor(a.rows, a.scale_inv), Factor(b.rows, b.scale_inv), torch.bfloat16
        )
