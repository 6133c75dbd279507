"""A gated pair whose activation is made inside its products, held to two plain linears."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from mcore_parallel.config import ParallelConfig
from mcore_parallel.gated_products import (
    gated_pair,
    in_turns,
    one_after_the_other,
    twin_kernels,
)
from mcore_parallel.linear import ColumnParallelLinear, Output, RowParallelLinear
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.pipeline import WeightQueue
from mcore_parallel.testing import run_ranks

S, B, D, WIDTH = 6, 2, 5, 8
KERNELS = twin_kernels(F.silu)


def pair(axis, sequence_parallel):
    """Two linears as a gated layer has them."""
    options = {"axis": axis, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
    fc1 = ColumnParallelLinear(D, [Output("gate", WIDTH), Output("up", WIDTH)], **options)
    fc2 = RowParallelLinear(WIDTH, D, **options)
    fc1.reset_parameters(seed=1)
    fc2.reset_parameters(seed=2)
    return torch.nn.Sequential(fc1, fc2)


def plain(layers, x):
    gate, up = layers[0](x).chunk(2, -1)
    return layers[1](F.silu(gate) * up)


def inside(layers, x):
    fc1, fc2 = layers
    return gated_pair(x, fc1.weight, fc2.weight, KERNELS, fc1.axis, fc1.sequence_parallel)


def check_over_ranks():
    for sequence_parallel in (False, True):
        axis = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2)).tp
        generator = torch.Generator().manual_seed(3)
        x, grad = (torch.randn(S, B, D, generator=generator).double() for _ in range(2))
        if sequence_parallel:
            x, grad = (t.chunk(2)[axis.rank] for t in (x, grad))
        for queue in (None, WeightQueue()):
            layers, twin = (pair(axis, sequence_parallel) for _ in range(2))
            if queue is not None:
                queue.serve(layers)
            for weight in (*layers.parameters(), *twin.parameters()):
                weight.main_grad = torch.zeros_like(weight)
            ys = []
            for run, model in ((inside, layers), (plain, twin)):
                rows = x.clone().requires_grad_()
                y = run(model, rows)
                y.backward(grad)
                ys += [y, rows.grad]
            if queue is not None:
                assert not any(weight.main_grad.any() for weight in layers.parameters())
                with torch.no_grad():  # as the pipeline calls them
                    for work, prepare in queue.take():
                        prepare()
                        work()
            torch.testing.assert_close(ys[:2], ys[2:], rtol=1e-12, atol=1e-12)
            for got, want in zip(layers.parameters(), twin.parameters(), strict=True):
                assert want.main_grad.any()
                torch.testing.assert_close(
                    got.main_grad, want.main_grad, rtol=1e-12, atol=1e-12
                )


def test_over_tensor_ranks_it_is_two_linears_with_gradients_made_at_once_or_later():
    run_ranks(check_over_ranks, 2)


def test_gradients_go_to_autograd_and_only_where_they_are_wanted():
    layers = pair(SINGLE, False)
    twin = pair(SINGLE, False)
    x = torch.randn(S, B, D, dtype=torch.float64, requires_grad=True)
    for wanted in ((True, True), (False, True), (True, False), (False, False)):
        for model in (layers, twin):
            for weight, is_wanted in zip(model.parameters(), wanted, strict=True):
                weight.requires_grad_(is_wanted)
                weight.grad = None
        inputs = [x.detach().requires_grad_() for _ in range(2)]
        inside(layers, inputs[0]).square().sum().backward()
        plain(twin, inputs[1]).square().sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
        for got, want in zip(layers.parameters(), twin.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None)
            if want.grad is not None:
                torch.testing.assert_close(got.grad, want.grad)


def test_a_stale_main_gradient_is_written_over_and_the_next_one_added():
    layers = pair(SINGLE, False)
    twin = pair(SINGLE, False)
    told = []
    for weight in layers.parameters():
        weight.main_grad = torch.full_like(weight, torch.nan)
        weight.main_grad_is_stale = True
        weight.main_grad_ready = lambda: told.append(1)
    x = torch.randn(S, B, D, dtype=torch.float64)
    for _ in range(2):
        inside(layers, x).square().sum().backward()
        plain(twin, x).square().sum().backward()
    assert len(told) == 4
    for got, want in zip(layers.parameters(), twin.parameters(), strict=True):
        assert got.grad is None
        torch.testing.assert_close(got.main_grad, want.grad)


def test_gate_and_up_are_kept_for_backward_and_what_they_make_is_not():
    layers = pair(SINGLE, False)
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        inside(layers, torch.randn(S, B, D, dtype=torch.float64))
    assert S * B * 2 * WIDTH in sizes
    assert S * B * WIDTH not in sizes


def test_backward_fills_no_zeros_for_the_activated_values():
    layers = pair(SINGLE, False)
    # The twin's own backward makes zeros.
    kernels = replace(KERNELS, narrow_backward=lambda _, __, h: (2 * h, 2 * h[:, ::2]))
    x, grad = (torch.randn(S, B, D, dtype=torch.float64) for _ in range(2))
    fc1, fc2 = layers
    y = gated_pair(x, fc1.weight, fc2.weight, kernels, SINGLE, False)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        y.backward(grad)
    made = {event.key for event in seen.events()}
    assert "aten::mm" in made
    assert not {"aten::zeros", "aten::fill_", "aten::zero_"} & made


def test_without_gradients_gate_and_up_are_not_even_made():
    layers, kept = pair(SINGLE, False), []

    def widen(x, weight, keep):
        kept.append(keep)
        return KERNELS.widen(x, weight, keep)

    spy = replace(KERNELS, widen=widen)
    x = torch.randn(S, B, D, dtype=torch.float64)
    fc1, fc2 = layers
    with torch.no_grad():
        got = gated_pair(x, fc1.weight, fc2.weight, spy, SINGLE, False)
    assert kept == [False]
    torch.testing.assert_close(got, plain(layers, x))


@pytest.mark.parametrize("shape", [(6,), (2, 8)])
def test_in_turns_is_undone(shape):
    x = torch.randn(shape)
    half = shape[-1] // 2
    assert torch.equal(in_turns(x)[..., 2], x[..., 1])
    assert torch.equal(in_turns(x)[..., 3], x[..., half + 1])
    assert torch.equal(one_after_the_other(in_turns(x)), x)
