"""Recomputed functions against plain ones: gradients, random streams, memory."""

import pytest
import torch
import torch.nn.functional as F

from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import ParallelConfig
from mcore_parallel.linear import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.recomputing import recompute
from mcore_parallel.rng import RngStreams, StreamDropout
from mcore_parallel.testing import run_ranks

S, B, D = 8, 2, 6


def block(ctx, streams):
    """Two parallel linears with dropout from a stream of either kind and from the default."""
    axis = ctx.tp
    fc1 = ColumnParallelLinear(D, 12, axis=axis, sequence_parallel=True, bias=True)
    fc2 = RowParallelLinear(12, D, axis=axis, sequence_parallel=True, bias=True)
    for seed, layer in enumerate((fc1, fc2)):
        layer.reset_parameters(seed)
    inner = StreamDropout(0.5, streams, "tensor_parallel")
    outer = StreamDropout(0.5, streams, "replicated")

    def function(x):
        return outer(fc2(inner(fc1(F.dropout(x, 0.3))))) + x

    return function, [*fc1.parameters(), *fc2.parameters()]


def run_block(ctx, is_recomputed):
    streams = RngStreams(5, ctx)
    function, parameters = block(ctx, streams)
    torch.manual_seed(11)
    x = torch.randn(S // ctx.tp.size, B, D).requires_grad_()
    y = x
    for _ in range(2):
        y = recompute(function, y, streams=streams) if is_recomputed else function(y)
    y.square().sum().backward()
    states = [*streams.state().values(), torch.get_rng_state()]
    return [y.detach(), x.grad, *(p.grad for p in parameters), *states]


def compare(expected, found):
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


def compare_on_ranks():
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
    compare(run_block(ctx, False), run_block(ctx, True))


def test_recomputed_blocks_give_the_same_bits_and_leave_all_generators_the_same():
    ctx = ParallelContext.single()
    compare(run_block(ctx, False), run_block(ctx, True))


def test_recomputed_parallel_blocks_give_the_same_bits_on_every_rank():
    run_ranks(compare_on_ranks, 4)


def test_without_the_streams_the_second_run_draws_other_masks():
    streams = RngStreams(5, ParallelContext.single())
    dropout = StreamDropout(0.5, streams, "replicated")
    x = torch.ones(64, requires_grad=True)
    y = recompute(lambda x: dropout(x).square(), x)
    y.sum().backward()
    assert not torch.equal(x.grad != 0, y != 0)
    x.grad = None
    y = recompute(lambda x: dropout(x).square(), x, streams=streams)
    y.sum().backward()
    assert torch.equal(x.grad, 4.0 * (y != 0) * 2)


def test_backward_may_run_twice():
    streams = RngStreams(5, ParallelContext.single())
    dropout = StreamDropout(0.5, streams, "replicated")
    x = torch.ones(64, requires_grad=True)
    y = recompute(lambda x: dropout(x).square(), x, streams=streams).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


def test_nothing_but_the_inputs_is_kept():
    saved = []

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    x = torch.ones(10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = recompute(lambda x: x.exp().exp().exp(), x)
    assert sum(saved) <= x.numel()
    y.sum().backward()
    expected = torch.ones(10, requires_grad=True)
    expected.exp().exp().exp().sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_several_results_and_arguments_that_are_no_tensors_pass_through():
    x = torch.ones(3, requires_grad=True)
    double, power = recompute(lambda x, n: (2 * x, x**n), x, 3)
    (double + power).sum().backward()
    assert x.grad.tolist() == [5.0, 5.0, 5.0]


def test_streams_come_back_when_the_second_run_fails():
    streams = RngStreams(5, ParallelContext.single())
    runs = []

    def function(x):
        runs.append(x)
        if len(runs) == 2:
            raise ZeroDivisionError
        return x.exp()

    y = recompute(function, torch.ones(3, requires_grad=True), streams=streams)
    before = streams.state()
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert all(torch.equal(before[name], s) for name, s in streams.state().items())


def counts_collectives():
    axis = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2)).tp
    seen = []

    def function(x):
        seen.append(all_reduce(x.detach(), axis))
        return x.exp() * seen[-1]

    x = torch.full((3,), float(axis.rank + 1), requires_grad=True)
    recompute(function, x).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_collectives_inside_run_again_on_every_rank():
    run_ranks(counts_collectives, 2)
