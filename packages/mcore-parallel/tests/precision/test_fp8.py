"""Casts and GEMMs in fp8 without a GPU: what is rounded, kept, reduced and left alone."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mcore_parallel.config import Fp8Config, ParallelConfig
from mcore_parallel.grad_slot import grad_slot
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.weight_queue import WeightQueue
from mcore_parallel.precision.fp8 import (
    TensorwiseGemm,
    WeightCasts,
    fp8_gemms,
    layer_gemms,
)
from mcore_parallel.precision.fp8_cast import cast, cast_plain, dequantized
from mcore_parallel.precision.gemm import PLAIN_GEMM
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.testing.ranks import run_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
T, D, F = 64, 96, 64


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(x, narrow):
    """What a tensor is worth after a cast, written out: scale, round, divide."""
    limit = {E4M3: 448.0, E5M2: 57344.0}[narrow]
    scale = limit / x.abs().max()
    return (x * scale).clamp(-limit, limit).to(narrow).to(x.dtype) * (x.abs().max() / limit)


def distance(got, want):
    return ((got - want).double().norm() / want.double().norm()).item()


def gradients(layer, x, dy):
    x = x.detach().requires_grad_()
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, [x, layer.weight], dy)


@pytest.mark.parametrize(("grad_dtype", "band"), [(E4M3, 0.045), (E5M2, 0.065)])
def test_products_are_those_of_rounded_factors_and_near_the_exact_ones(grad_dtype, band):
    layer = ColumnParallelLinear(D, F, gemm=TensorwiseGemm(grad_dtype=grad_dtype))
    x, dy = draw(T, 1, D), draw(T, 1, F, seed=1)
    got = gradients(layer, x, dy)
    flat, flat_dy, weight = x.flatten(0, 1), dy.flatten(0, 1), layer.weight.detach()
    x8, w8, dy8 = rounded(flat, E4M3), rounded(weight, E4M3), rounded(flat_dy, grad_dtype)
    written_out = (x8 @ w8.t(), dy8 @ w8, dy8.t() @ x8)
    exact = (flat @ weight.t(), flat_dy @ weight, flat_dy.t() @ flat)
    for own, want, true in zip(got, written_out, exact, strict=True):
        assert torch.equal(own.flatten(0, -2), want)
        assert 0.01 < distance(own.flatten(0, -2), true) < band


@pytest.mark.parametrize("narrow", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_the_largest_number_becomes_the_formats_largest_at_any_size(narrow, size):
    x = draw(32, 48) * size
    own = cast(x, narrow)
    assert own.rows.float().abs().max() == torch.finfo(narrow).max
    assert torch.equal(own.columns.float(), own.rows.float().t())
    assert distance(dequantized(own.rows, own.scale_inv), x) < 0.07


def test_zeros_stay_zero_and_what_is_not_finite_makes_every_product_nan():
    zeros = cast(torch.zeros(16, 16), E4M3)
    assert not dequantized(zeros.rows, zeros.scale_inv).any()
    gemm = TensorwiseGemm(grad_dtype=E5M2)
    for strange in (float("inf"), -float("inf"), float("nan")):
        x = draw(16, D)
        x[3, 5] = strange
        y, _ = gemm.forward(x, draw(F, D), None)
        assert y.isnan().all()


def test_a_number_above_the_reduced_largest_is_clamped_not_turned_into_nan():
    own = cast_plain(torch.tensor([[1.0, 9.0]]), torch.tensor([1.0]), E4M3)
    assert dequantized(own.rows, own.scale_inv).tolist() == [[1.0, 1.0]]


def test_what_is_saved_for_backward_is_one_byte_an_element_and_recomputation_is_exact():
    layer = ColumnParallelLinear(D, F, gemm=TensorwiseGemm(grad_dtype=E5M2))
    x, dy = draw(T, 1, D), draw(T, 1, F, seed=1)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        want = gradients(layer, x, dy)
    assert [t.shape for t in saved if t.dtype == E4M3] == [(D, T)]
    assert all(t.numel() <= 1 for t in saved if t.dtype != E4M3 and t.shape != (F, D))
    again = gradients(
        lambda_of(layer, lambda x: checkpoint(layer, x, use_reentrant=False)), x, dy
    )
    assert all(map(torch.equal, again, want))


def lambda_of(layer, function):
    """A function with the layer's weight, for ``gradients``."""
    function.weight = layer.weight
    return function


def test_weight_gradients_are_added_to_the_main_gradient_at_once_or_later():
    layer = ColumnParallelLinear(D, F, gemm=TensorwiseGemm(grad_dtype=E5M2))
    x, dy = draw(T, 1, D), draw(T, 1, F, seed=1)
    *_, want = gradients(layer, x, dy)
    slot = grad_slot(layer.weight)
    slot.main, slot.is_stale = torch.full((F, D), 7.0), True
    for times in (1, 2):
        layer(x).backward(dy)
        assert torch.equal(slot.main, times * want)
    queue = WeightQueue()
    slot.queue = queue
    layer(x).backward(dy)
    assert torch.equal(slot.main, 2 * want)
    for work, _ in queue.take():
        work()
    assert torch.equal(slot.main, 3 * want)


def test_casts_of_weights_are_kept_inside_a_step_and_never_after_it():
    casts = WeightCasts()
    layer = ColumnParallelLinear(D, F, gemm=TensorwiseGemm(grad_dtype=E5M2, casts=casts))
    x = draw(T, 1, D)
    with casts.keeping():
        before = layer(x)
        first = casts.of(layer.weight, layer.axis)
        assert casts.of(layer.weight.detach(), layer.axis) is first
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer(x), 2 * before)
    with casts.keeping():
        assert torch.equal(layer(x), 2 * before)


def test_sizes_that_tensor_cores_do_not_take_are_multiplied_plainly(caplog):
    gemm = TensorwiseGemm(grad_dtype=E5M2)
    assert ColumnParallelLinear(D, 40, gemm=gemm).gemm is PLAIN_GEMM
    assert "40 x 96" in caplog.text
    layer = ColumnParallelLinear(D, F, gemm=gemm)
    plain = ColumnParallelLinear(D, F)
    plain.weight.data.copy_(layer.weight.data)
    x, dy = draw(10, 3, D), draw(10, 3, F, seed=1)  # 30 tokens
    assert all(map(torch.equal, gradients(layer, x, dy), gradients(plain, x, dy)))


def test_layers_at_both_ends_stay_out_of_fp8():
    config = Fp8Config(
        fp8_format="hybrid", first_last_layers_bf16=True, num_layers_at_end_in_bf16=2
    )
    ctx = ParallelContext.single("cpu")
    gemms = layer_gemms(config, ctx, 6, WeightCasts())
    assert [each.column is PLAIN_GEMM for each in gemms] == [True, *[False] * 3, True, True]
    assert gemms[1].column.grad_dtype == E5M2
    whole = layer_gemms(Fp8Config(fp8_format="e4m3"), ctx, 2, WeightCasts())
    assert whole[0].row.grad_dtype == E4M3
    assert all(
        each.row is PLAIN_GEMM for each in layer_gemms(Fp8Config(), ctx, 2, WeightCasts())
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"first_last_layers_bf16": True}, "without --fp8-format"),
        ({"fp8_format": "e4m3", "num_layers_at_end_in_bf16": 2}, "without --first-last"),
        ({"num_layers_at_start_in_bf16": -1}, "must be 0 or more"),
    ],
)
def test_options_without_effect_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Fp8Config(**options)


def check_split(sequence_parallel, grad_dtype):
    """Column and row linears over two ranks, whose largest numbers are on one of them."""
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
    kind = "e4m3" if grad_dtype == E4M3 else "hybrid"
    gemms = fp8_gemms(Fp8Config(fp8_format=kind), ctx, WeightCasts())
    options = {"axis": ctx.tp, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
    wide = ColumnParallelLinear(D, F, gemm=gemms.column, **options)
    narrow = RowParallelLinear(F, D, gemm=gemms.row, **options)
    lone = TensorwiseGemm(grad_dtype=grad_dtype)
    whole = ColumnParallelLinear(D, F, gemm=lone, dtype=torch.float64)
    back = RowParallelLinear(F, D, gemm=lone, dtype=torch.float64)
    factors = torch.linspace(0.1, 5, F, dtype=torch.float64)
    with torch.no_grad():
        whole.weight.copy_(draw(F, D, seed=2).double() * factors[:, None])
        back.weight.copy_(draw(D, F, seed=3).double() * factors)
        wide.weight.copy_(whole.weight.chunk(2)[ctx.tp.rank])
        narrow.weight.copy_(back.weight.chunk(2, 1)[ctx.tp.rank])
    x, dy = draw(T, 1, D).double(), draw(T, 1, D, seed=1).double()

    def cut(t):
        return t.chunk(2)[ctx.tp.rank] if sequence_parallel else t

    y, dx, dw = gradients(lambda_of(whole, lambda x: back(whole(x))), x, dy)
    own = gradients(lambda_of(wide, lambda x: narrow(wide(x))), cut(x), cut(dy))
    want = cut(y), cut(dx), dw.chunk(2)[ctx.tp.rank]
    return [distance(a, b) for a, b in zip(own, want, strict=True)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2])
def test_linears_split_over_ranks_cast_as_one_rank_does(sequence_parallel, grad_dtype):
    for errors in run_ranks(check_split, 2, sequence_parallel, grad_dtype):
        assert max(errors) < 1e-12
