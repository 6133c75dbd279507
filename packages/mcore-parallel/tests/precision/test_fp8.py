"""Casts and GEMMs in fp8 without a GPU: what is rounded, kept, reduced and left alone."""

import itertools
from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from warm_ranks import run_ranks

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.config import (
    ParallelConfig,
)
from mcore_parallel.kernels.fp8_cast import cast_plain, dequantized
from mcore_parallel.kernels.fp8_fine_cast import cast_blocks, dequantized_lines
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.weight_queue import WeightQueue
from mcore_parallel.precision.config import Fp8Config
from mcore_parallel.precision.fp8 import (
    Fp8Gemm,
    WeightCasts,
    delayed_scales,
    fp8_gemms,
    layer_gemms,
)
from mcore_parallel.precision.fp8_cast import cast, cast_lines
from mcore_parallel.precision.fp8_recipes import Cut, Delayed, Tensorwise
from mcore_parallel.precision.gemm import PLAIN_GEMM
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

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
    layer = ColumnParallelLinear(D, F, gemm=Fp8Gemm(grad_dtype=grad_dtype))
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
    gemm = Fp8Gemm(grad_dtype=E5M2)
    for strange in (float("inf"), -float("inf"), float("nan")):
        x = draw(16, D)
        x[3, 5] = strange
        y, _ = gemm.forward(x, draw(F, D), None)
        assert y.isnan().all()
        assert cast(x, E5M2).columns.float().isnan().all()


@pytest.mark.parametrize("strange", [float("inf"), -float("inf"), float("nan")])
def test_what_shares_a_scale_with_a_number_that_is_not_finite_is_nan_and_nothing_else(strange):
    x = draw(256, 384)
    x[3, 5] = strange
    one_row, one_column = torch.zeros(2, 256, 384, dtype=torch.bool)
    one_row[3], one_column[:, 5] = True, True
    along, across, square = torch.zeros(3, 256, 384, dtype=torch.bool)
    along[3, :128], across[:128, 5], square[:128, :128] = True, True, True
    for narrow in (E4M3, E5M2):
        for own, lost, lost_by_columns in (
            (cast_lines(x, narrow), one_row, one_column),
            (cast_blocks(x, narrow), along, across),
            (cast_blocks(x, narrow, is_square=True), square, square),
        ):
            for numbers, scales, want in (
                (own.rows, own.row_scales, lost),
                (own.columns, own.column_scales, lost_by_columns.t()),
            ):
                assert torch.equal(numbers.float().isnan(), want)
                assert torch.equal(dequantized_lines(numbers, scales).isnan(), want)


def test_a_number_above_the_reduced_largest_is_clamped_not_turned_into_nan():
    own = cast_plain(torch.tensor([[1.0, 9.0]]), torch.tensor([1.0]), E4M3)
    assert dequantized(own.rows, own.scale_inv).tolist() == [[1.0, 1.0]]


def test_what_is_saved_for_backward_is_one_byte_an_element_and_recomputation_is_exact():
    layer = ColumnParallelLinear(D, F, gemm=Fp8Gemm(grad_dtype=E5M2))
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
    layer = ColumnParallelLinear(D, F, gemm=Fp8Gemm(grad_dtype=E5M2))
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
    layer = ColumnParallelLinear(D, F, gemm=Fp8Gemm(grad_dtype=E5M2, casts=casts))
    x = draw(T, 1, D)
    with casts.keeping():
        before = layer(x)
        first = casts.of(layer.weight, Tensorwise(), Cut())
        assert casts.of(layer.weight.detach(), Tensorwise(), Cut()) is first
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer(x), 2 * before)
    with casts.keeping():
        assert torch.equal(layer(x), 2 * before)


def test_sizes_that_tensor_cores_do_not_take_are_multiplied_plainly(caplog):
    gemm = Fp8Gemm(grad_dtype=E5M2)
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
    gemms = layer_gemms(config, ctx, 6, WeightCasts(), num_mtp_layers=1)
    kinds = [each.column is PLAIN_GEMM for each in gemms]
    assert kinds == [True, *[False] * 3, True, True, True]
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
        ({"fp8_recipe": "delayed"}, "without --fp8-format"),
        ({"fp8_format": "e4m3", "fp8_amax_history_len": 4}, "without --fp8-recipe delayed"),
        ({"fp8_amax_history_len": 0}, "must be 1 or more"),
        ({"fp8_format": "hybrid", "fp8_recipe": "blockwise"}, "e4m3 only"),
        ({"fp8_format": "e4m3", "num_layers_at_end_in_bf16": 2}, "without --first-last"),
        ({"num_layers_at_start_in_bf16": -1}, "must be 0 or more"),
    ],
)
def test_options_without_effect_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Fp8Config(**options)


def split_errors(ctx, recipe, grad_dtype, sequence_parallel):
    """How far column and row linears over two ranks are from those on one."""
    T, D, F = (256, 128, 256) if recipe == "blockwise" else (64, 96, 64)
    config = Fp8Config(fp8_format="e4m3" if grad_dtype == E4M3 else "hybrid", fp8_recipe=recipe)
    gemms = fp8_gemms(config, ctx, WeightCasts())
    options = {"axis": ctx.tp, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
    wide = ColumnParallelLinear(D, F, gemm=gemms.column, **options)
    narrow = RowParallelLinear(F, D, gemm=gemms.row, **options)
    lone = Fp8Gemm(grad_dtype=grad_dtype, recipe=gemms.column.recipe)
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
    return max(distance(a, b) for a, b in zip(own, want, strict=True))


def check_split():
    """Largest numbers are on one of the ranks; return what does not fit, by case."""
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
    cases = [
        *itertools.product(("tensorwise", "rowwise"), (E4M3, E5M2), (False, True)),
        *itertools.product(("blockwise",), (E4M3,), (False, True)),
    ]
    return [case for case in cases if split_errors(ctx, *case) > 1e-12]


def test_linears_split_over_ranks_cast_as_one_rank_does():
    assert run_ranks(check_split, 2) == [[], []]


def test_a_scale_for_each_row_or_block_is_of_its_own_largest_number():
    x = draw(256, 384) * torch.logspace(-3, 3, 384)
    for narrow in (E4M3, E5M2):
        limit, own = torch.finfo(narrow).max, cast_lines(x, narrow)
        assert (own.rows.float().abs().amax(1) == limit).all()
        assert (own.columns.float().abs().amax(1) == limit).all()
        for is_square in (False, True):
            own = cast_blocks(x, narrow, is_square=is_square)
            for blocks, scales in (
                (own.rows, own.row_scales),
                (own.columns, own.column_scales),
            ):
                shape = (len(scales), -1, scales.shape[1], 128)
                tops = blocks.float().view(shape).abs().amax((1, 3))
                assert ((tops > limit / 2.2) & (tops <= limit)).all()
                assert (scales.log2() % 1 == 0).all()
            assert distance(dequantized_lines(own.rows, own.row_scales), x) < 0.07
            assert distance(dequantized_lines(own.columns, own.column_scales), x.t()) < 0.07
    assert own.row_scales.shape == (2, 3)
    assert own.column_scales.shape == (3, 2)


@contextmanager
def step(scales):
    with scales.noting():
        yield
    scales.move_on()


def delayed_linear(**options):
    config = Fp8Config(fp8_format="hybrid", fp8_recipe="delayed", **options)
    scales = delayed_scales(config, ParallelContext.single())
    gemm = Fp8Gemm(grad_dtype=E5M2, recipe=Delayed(scales, "blocks.3"))
    return scales, ColumnParallelLinear(D, F, gemm=gemm)


def test_delayed_scales_are_those_of_the_step_before_and_clamp_what_has_grown():
    scales, layer = delayed_linear()
    current = ColumnParallelLinear(D, F, gemm=Fp8Gemm(grad_dtype=E5M2))
    current.weight.data.copy_(layer.weight.data)
    x, dy = draw(T, 1, D), draw(T, 1, F, seed=1)
    with step(scales):
        first = gradients(layer, x, dy)
        assert all(map(torch.equal, first, gradients(current, x, dy)))  # there is no history
        gradients(layer, x / 2, dy / 2)  # a smaller micro-batch says nothing
    with step(scales):
        y, *_ = gradients(layer, x / 3, dy)
        own = cast_plain((x / 3).flatten(0, 1), x.abs().max().view(1), E4M3)
        x8, w8 = dequantized(own.rows, own.scale_inv), rounded(layer.weight.detach(), E4M3)
        assert torch.equal(y.flatten(0, 1), x8 @ w8.t())
        y, *_ = gradients(layer, 4 * x, dy)
        clamped = x.clamp(-x.abs().max() / 4, x.abs().max() / 4)
        assert torch.equal(y, gradients(layer, 4 * clamped, dy)[0])
    with step(scales):
        assert torch.equal(gradients(layer, 4 * x, dy)[0], 4 * first[0])


def test_a_step_repeats_its_casts_whatever_it_has_seen_meanwhile():
    scales, layer = delayed_linear()
    x, dy = draw(T, 1, D), draw(T, 1, F, seed=1)
    for growth in (9, 99):
        with step(scales):
            want = gradients(layer, x, dy)
            gradients(layer, growth * x, growth * dy)
            repeated = lambda_of(layer, lambda x: checkpoint(layer, x, use_reentrant=False))
            assert all(map(torch.equal, gradients(repeated, x, dy), want))
    # Nothing is noted outside a step, as in an evaluation.
    before = {name: shard.pieces[0].data.clone() for name, shard in scales.shards().items()}
    gradients(layer, 999 * x, dy)
    with step(scales):
        gradients(layer, 99 * x, 99 * dy)
    (name, history), *_ = before.items()
    assert name == "blocks.3.0.history"
    assert torch.equal(scales.shards()[name].pieces[0].data, history)


def test_a_history_keeps_its_length_and_skips_what_says_nothing():
    scales, layer = delayed_linear(fp8_amax_history_len=3, fp8_amax_compute_algo="max")
    dy = draw(T, 1, F, seed=1)
    for size in (1.0, 8.0, 2.0, 0.0, float("inf"), 1.5):
        with step(scales):
            gradients(layer, torch.full((T, 1, D), size), dy)
    (shard,) = scales.shards().values()
    assert shard.pieces[0].data[0].tolist() == [1.5, 2.0, 2.0]
    history, x = shard.pieces[0].data.clone(), draw(T, 1, D)
    with step(scales):
        expected = gradients(layer, x, dy)
    for algorithm, is_same in (("max", True), ("most_recent", False)):
        again, other = delayed_linear(fp8_amax_history_len=3, fp8_amax_compute_algo=algorithm)
        again.shards()["blocks.3.0.history"].pieces[0].data.copy_(history)
        again.restored()
        other.weight.data.copy_(layer.weight.data)
        with step(again):
            assert all(map(torch.equal, gradients(other, x, dy), expected)) == is_same


def test_a_number_that_is_not_finite_stays_one_under_an_earlier_scale():
    scales, layer = delayed_linear()
    x, dy = draw(T, 1, D), draw(T, 1, F, seed=1)
    with step(scales):
        gradients(layer, x, dy)
    x[3, 0, 5] = float("inf")
    with step(scales):
        y, *_ = gradients(layer, x, dy)
    assert y[3].isnan().all()
    assert y[:3].isfinite().all()
