"""Collective pairs against sums and slices written out, compiled and not."""

import pytest
import torch
import torch.distributed as dist
from warm_ranks import run_ranks

from mcore_parallel import collectives as c
from mcore_parallel.collectives import begin_gather_partial
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.rng import fill_normal_

# float64: sums over at most four ranks in another order.
EXACT = {"rtol": 1e-13, "atol": 1e-13}
SHAPE = (8, 12, 4)


def normal(name, shape=SHAPE):
    """Numbers every rank can make for every other, in a memory order that is not row-major."""
    x = torch.empty(tuple(reversed(shape)), dtype=torch.float64).permute(2, 1, 0)
    fill_normal_(x, seed=3, name=name, shape=shape, offsets=(0, 0, 0), std=1.0)
    assert not x.is_contiguous()
    return x


def axis_of(kind):
    if kind in ("two", "four"):
        size = {"two": 2, "four": 4}[kind]
        return ParallelContext.build(ParallelConfig(tensor_model_parallel_size=size)).tp
    axis = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2)).dp
    assert axis.ranks[1] - axis.ranks[0] == 2
    return axis


def parts(x, axis, dim):
    return x.chunk(axis.size, dim)


# Uneven, with nothing from some ranks to some others.
def rows_sent(axis):
    return [[(3 * i + j) % 4 for j in range(axis.size)] for i in range(axis.size)]


def exchange(values, table, axis):
    """Rows that this rank receives when rank i sends values[i] by table[i]."""
    return torch.cat([v.split(row)[axis.rank] for v, row in zip(values, table, strict=True)])


def cases(axis, dim):
    """Name, function, and what it gives forward and backward, from all ranks' x and grad."""
    a, r = axis, axis.rank
    sent = rows_sent(a)
    received = [[row[j] for row in sent] for j in range(a.size)]
    return {
        "copy_to": (lambda x: c.copy_to(x, a), lambda xs: xs[r], sum),
        "reduce_from": (lambda x: c.reduce_from(x, a), sum, lambda gs: gs[r]),
        "split_to": (
            lambda x: c.split_to(x, a, dim),
            lambda xs: parts(xs[r], a, dim)[r],
            lambda gs: torch.cat(gs, dim),
        ),
        "gather_from": (
            lambda x: c.gather_from(x, a, dim),
            lambda xs: torch.cat(xs, dim),
            lambda gs: parts(gs[r], a, dim)[r],
        ),
        "gather_partial_from": (
            lambda x: c.gather_partial_from(x, a, dim),
            lambda xs: torch.cat(xs, dim),
            lambda gs: parts(sum(gs), a, dim)[r],
        ),
        "reduce_scatter_to": (
            lambda x: c.reduce_scatter_to(x, a, dim),
            lambda xs: parts(sum(xs), a, dim)[r],
            lambda gs: torch.cat(gs, dim),
        ),
        "all_to_all": (
            lambda x: c.all_to_all(x[: sum(sent[r])], a, sent[r], received[r]),
            lambda xs: exchange(
                [x[: sum(row)] for x, row in zip(xs, sent, strict=True)], sent, a
            ),
            None,
        ),
    }


def check(kind, dim, compiled):
    axis = axis_of(kind)
    table = cases(axis, dim)

    def run_all(*xs):
        return [function(x) for (function, _, _), x in zip(table.values(), xs, strict=True)]

    if compiled and dist.get_rank() == 0:
        torch.compiler.reset()
        run_all = torch.compile(run_all, backend="aot_eager", fullgraph=True)
    xs = {name: [normal(f"{name} {rank}") for rank in range(axis.size)] for name in table}
    own = [x[axis.rank].clone().requires_grad_() for x in xs.values()]
    before = [x.detach().clone() for x in own]
    outputs = run_all(*own)
    grads = []
    for name, y in zip(table, outputs, strict=True):
        torch.testing.assert_close(y, table[name][1](xs[name]), **EXACT, msg=name)
        grads.append(normal(f"grad {name} {axis.rank}", tuple(y.shape)))
    torch.autograd.backward(outputs, grads)
    for name, x, start, y in zip(table, own, before, outputs, strict=True):
        assert torch.equal(x, start), f"{name} changed its input"
        if table[name][2] is not None:
            gs = [normal(f"grad {name} {rank}", tuple(y.shape)) for rank in range(axis.size)]
            torch.testing.assert_close(x.grad, table[name][2](gs), **EXACT, msg=name)
    check_exchange_backward(axis, own[-1], outputs[-1], xs["all_to_all"])


def check_exchange_backward(axis, x, y, xs):
    """The gradient of a row comes from where the row went: the exchange is its transpose."""
    sent = rows_sent(axis)
    sizes = [sum(row[rank] for row in sent) for rank in range(axis.size)]
    total = 0.0
    for rank in range(axis.size):
        here = Axis("", axis.size, rank, None, axis.ranks)
        trimmed = [z[: sum(row)] for z, row in zip(xs, sent, strict=True)]
        grad = normal(f"grad all_to_all {rank}", (sizes[rank], *SHAPE[1:]))
        total += float((exchange(trimmed, sent, here) * grad).sum())
    product = c.all_reduce((x.detach() * x.grad).sum(), axis)
    torch.testing.assert_close(float(product), total, rtol=1e-12, atol=1e-12)
    assert not x.grad[sum(sent[axis.rank]) :].any()
    assert y.shape[0] == sizes[axis.rank]


def check_all():
    for kind in ("strided", "four"):
        for dim in (0, 1, -1):
            check(kind, dim, compiled=False)


def check_compiled():
    # Ranks trace alike, and compiling takes seconds: one does, beside one that does not.
    check("two", 0, compiled=True)
    check("two", 1, compiled=True)


def test_pairs_give_what_their_table_says_over_any_dimension_and_strided_ranks():
    run_ranks(check_all, 4)


@pytest.mark.parity_long
def test_compiled_pairs_give_the_same():
    run_ranks(check_compiled, 2, check_shapes=False)


def plain():
    axis = axis_of("strided")
    x = normal(f"plain {axis.rank}")
    both = [normal(f"plain {rank}") for rank in range(2)]
    kept = x.clone()
    torch.testing.assert_close(c.all_reduce(x, axis), sum(both), **EXACT)
    assert torch.equal(c.all_reduce(x, axis, "max"), torch.maximum(*both))
    assert torch.equal(c.all_reduce(x, axis, "min"), torch.minimum(*both))
    assert torch.equal(c.all_gather(x, axis, 1), torch.cat(both, 1))
    torch.testing.assert_close(
        c.reduce_scatter(x, axis, -1), sum(both).chunk(2, -1)[axis.rank], **EXACT
    )
    begun = (
        c.start_all_reduce(x, axis),
        c.start_all_gather(x, axis),
        c.start_reduce_scatter(x, axis),
    )
    reduced, gathered, scattered = (c.wait(y) for y in begun)
    torch.testing.assert_close(reduced, sum(both), **EXACT)
    assert torch.equal(gathered, torch.cat(both))
    torch.testing.assert_close(scattered, sum(both).chunk(2)[axis.rank], **EXACT)
    seen = []
    y = x.detach().requires_grad_()
    handle = begin_gather_partial(y, axis)
    beside = y.exp()
    beside.grad_fn.register_hook(lambda *_: seen.append("beside"))
    handle._x.grad_fn.register_hook(lambda *_: seen.append("waited for"))
    gathered = handle.wait()
    assert torch.equal(gathered, torch.cat(both))
    (gathered * torch.cat(both) * (1 + axis.rank) + beside.repeat(2, 1, 1)).sum().backward()
    assert seen == ["beside", "waited for"]
    torch.testing.assert_close(y.grad, 3 * x + 2 * x.exp(), **EXACT)
    assert torch.equal(x, kept)
    counts = torch.tensor([3, 0, 2**40 + axis.rank])
    assert c.all_reduce(counts, axis).tolist() == [6, 0, 2**41 + 1]
    assert counts.tolist() == [3, 0, 2**40 + axis.rank]
    assert c.all_reduce(x.sum(), axis).shape == ()


def test_plain_collectives_return_new_tensors_and_leave_their_input():
    run_ranks(plain, 4)


def test_over_one_rank_every_function_returns_its_input():
    x = torch.ones(3, 4)
    for function in (
        c.all_reduce,
        c.all_gather,
        c.reduce_scatter,
        c.own_slice,
        c.start_all_reduce,
        c.start_all_gather,
        c.start_reduce_scatter,
        c.copy_to,
        c.reduce_from,
        c.split_to,
        c.gather_from,
        c.gather_partial_from,
        c.reduce_scatter_to,
    ):
        assert function(x, SINGLE) is x
    assert c.all_to_all(x, SINGLE, [3], [3]) is x


@pytest.mark.parametrize(
    "function",
    [c.reduce_scatter, c.own_slice, c.split_to, c.reduce_scatter_to],
)
def test_sizes_that_do_not_divide_are_refused_before_anything_is_sent(function):
    axis = Axis("tp", 2, 0, None, (0, 1))
    with pytest.raises(ValueError, match="dimension 1 of size 3 does not divide over axis tp"):
        function(torch.ones(2, 3), axis, 1)
    with pytest.raises(ValueError, match="dimension 0 of size 3"):
        c.start_reduce_scatter(torch.ones(3, 2), axis)
