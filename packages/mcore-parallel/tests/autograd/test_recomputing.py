"""Recomputed functions against plain ones: gradients, random streams, memory."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from warm_ranks import run_ranks

from mcore_parallel.autograd.recomputing import recompute, recompute_between
from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.rng import RngStreams, StreamDropout
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

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


def shared_block(ctx, streams):
    """As ``block`` on inputs that every tensor rank holds whole."""
    fc1 = ColumnParallelLinear(D, 12, axis=ctx.tp, bias=True)
    fc2 = RowParallelLinear(12, D, axis=ctx.tp, bias=True)
    for seed, layer in enumerate((fc1, fc2)):
        layer.reset_parameters(seed)
    inner = StreamDropout(0.5, streams, "tensor_parallel")
    outer = StreamDropout(0.5, streams, "replicated")

    def function(x, scale, table):
        return outer(fc2(inner(fc1(x * table)))) * scale + x

    return function, [*fc1.parameters(), *fc2.parameters()]


def run_shared(ctx, how):
    streams = RngStreams(5, ctx)
    function, parameters = shared_block(ctx, streams)
    torch.manual_seed(11)
    x = torch.randn(S, B, D).requires_grad_()
    scale = torch.tensor(1.5, requires_grad=True)  # one number does not divide: kept whole
    table, y, states = torch.rand(D), x, []
    for _ in range(2):
        if how == "plain":
            y = function(y, scale, table)
        else:
            axis = ctx.tp if how == "pieces" else SINGLE
            y = recompute(function, y, scale, table, streams=streams, shared_by=axis)
        states.append(weakref.ref(y))
    loss = y.square().sum()
    del y
    # In pieces nobody holds what went from the first block to the second.
    alive = [state() is not None for state in states]
    loss.backward(retain_graph=True)
    first = [x.grad.clone(), scale.grad.clone(), *(p.grad.clone() for p in parameters)]
    loss.backward()
    assert torch.equal(x.grad, 2 * first[0])
    return alive, [loss.detach(), *first, *streams.state().values(), torch.get_rng_state()]


def compare_pieces():
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
    _, plain = run_shared(ctx, "plain")
    alive_whole, whole = run_shared(ctx, "whole")
    alive_pieces, pieces = run_shared(ctx, "pieces")
    compare(plain, whole)
    compare(plain, pieces)
    return alive_whole[0], alive_pieces[0]


def test_inputs_kept_in_pieces_give_the_same_bits_and_are_freed_whole():
    assert run_ranks(compare_pieces, 4) == [(True, False)] * 4


def between(how, streams=None, consumer=None):
    torch.manual_seed(3)
    weight = torch.randn(D, 12, requires_grad=True)
    gain = torch.randn(D, requires_grad=True)
    x = torch.randn(S, B, D, requires_grad=True)
    dropout = StreamDropout(0.4, streams, "replicated") if streams else nn.Identity()
    seen = []

    def producer(x):
        made = dropout(F.rms_norm(x, (D,), gain))
        seen.append(weakref.ref(made))
        return made

    def two_products(y):
        return (y.flatten(0, 1) @ weight).square().sum() + (y @ weight).exp().sum()

    consumer = consumer or two_products
    between = x * 2.0
    if how == "plain":
        loss = consumer(producer(between))
    else:
        loss = recompute_between(producer, consumer, between, streams=streams)
    is_alive = seen[0]() is not None
    loss.backward()
    return [x.grad, gain.grad, weight.grad], is_alive, len(seen)


@pytest.mark.parametrize("has_dropout", [False, True])
def test_what_lies_between_is_freed_and_made_again_once_with_the_same_bits(has_dropout):
    results = []
    for how in ("plain", "between"):
        streams = RngStreams(5, ParallelContext.single()) if has_dropout else None
        results.append(between(how, streams))
    (plain, _, _), (found, is_alive, num_made) = results
    compare(plain, found)
    assert not is_alive
    assert num_made == 2


def test_a_consumer_that_keeps_nothing_makes_nothing_again():
    grads, _, num_made = between("between", consumer=lambda y: y.sum())
    assert num_made == 1
    assert grads[2] is None


def test_without_gradient_nothing_is_kept_or_made_again():
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        y = recompute_between(torch.exp, torch.exp, x)
    assert not y.requires_grad
    assert torch.equal(y, torch.ones(3).exp().exp())
