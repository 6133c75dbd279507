"""Parallel linears against plain ones: forward, every gradient, compiled and not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from warm_ranks import run_ranks

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.pipeline_parallel.weight_queue import WeightQueue
from mcore_parallel.rng import fill_normal_
from mcore_parallel.sharding import named_parameters, named_shards
from mcore_parallel.tensor_parallel.linear import (
    ColumnParallelLinear,
    LinearOutput,
    RowParallelLinear,
)

# float64: the order of a few dozen additions is all that differs.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
S, B, D = 12, 3, 5


def normal(name, *shape):
    """Float64 numbers that every rank draws alike."""
    x = torch.empty(shape, dtype=torch.float64)
    fill_normal_(x, seed=3, name=name, shape=shape, offsets=(0,) * len(shape), std=1.0)
    return x


def fill(layer):
    """Give every logical tensor of a layer, biases too, its own non-zero numbers."""
    for name, shard in named_shards(layer).items():
        for piece in shard.pieces:
            fill_normal_(
                piece.data,
                seed=7,
                name=name,
                shape=shard.shape,
                offsets=piece.offsets,
                std=1.0,
            )


def whole_weight(outputs, kind, *rest):
    names = [(f"{o.name}.{kind}" if o.name else kind, (o.size, *rest)) for o in outputs]
    tensors = []
    for name, shape in names:
        x = torch.empty(shape, dtype=torch.float64)
        fill_normal_(x, seed=7, name=name, shape=shape, offsets=(0,) * len(shape), std=1.0)
        tensors.append(x.requires_grad_())
    return tensors


def own_rows(x, output, axis, dim=0):
    """Rows of one output that a rank holds: block rank // replicas."""
    num_blocks = axis.size // output.replicas.size
    return x.chunk(num_blocks, dim)[axis.rank // output.replicas.size]


def cut(x, axis, is_cut):
    return x.chunk(axis.size, 0)[axis.rank] if is_cut else x


def non_contiguous(x):
    """Return the same numbers in another memory order."""
    y = x.transpose(0, -1).contiguous().transpose(0, -1)
    assert not y.is_contiguous()
    return y


def summed_gradients(layer):
    """Gradients by logical name after the sums that finalisation owes, as this rank's boxes."""
    gradients = {}
    for named in named_parameters(layer):
        for part in named.layout.parts:
            grad = part.view(named.parameter.grad).clone()
            if part.partial.size > 1:
                torch.distributed.all_reduce(grad, group=part.partial.group)
            gradients[part.name] = grad
    return gradients


def axis_of(kind):
    """Contiguous tensor ranks, strided ones, four with two heads of keys, or one."""
    if kind == "single":
        return SINGLE, SINGLE
    if kind == "four":
        ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=4))
        return ctx.tp, ctx.tp_block(2)
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
    axis = ctx.tp if kind == "neighbours" else ctx.dp
    assert axis.ranks[1] - axis.ranks[0] == (1 if kind == "neighbours" else 2)
    return axis, SINGLE


def check_column(kind, sequence_parallel, compiled):
    axis, replicas = axis_of(kind)
    outputs = (
        LinearOutput("q", 8),
        LinearOutput("k", 2, replicas),
        LinearOutput("v", 6, replicas),
    )
    layer = ColumnParallelLinear(
        D,
        outputs,
        bias=True,
        axis=axis,
        sequence_parallel=sequence_parallel,
        dtype=torch.float64,
    )
    fill(layer)
    torch.compiler.reset()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer

    x = normal("x", S, B, D).requires_grad_()
    weights, biases = whole_weight(outputs, "weight", D), whole_weight(outputs, "bias")
    expected = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    # Each rank that holds a copy of k and v uses it for its own part of the loss.
    upstream = [normal(f"grad {o.name} {axis.rank}", S, B, o.size) for o in outputs]
    loss = torch.zeros((), dtype=torch.float64)
    for rank in range(axis.size):
        for y, output in zip(expected, outputs, strict=True):
            block = rank // output.replicas.size
            size = output.size * output.replicas.size // axis.size
            g = normal(f"grad {output.name} {rank}", S, B, output.size)
            loss = loss + (y * g)[..., block * size : (block + 1) * size].sum()
    loss.backward()

    local_x = non_contiguous(cut(x.detach(), axis, sequence_parallel)).requires_grad_()
    ys = run(local_x).split(layer.output_sizes, dim=-1)
    for y, whole_y, output in zip(ys, expected, outputs, strict=True):
        torch.testing.assert_close(y, own_rows(whole_y, output, axis, -1), **EXACT)
    grads = [own_rows(g, o, axis, -1) for g, o in zip(upstream, outputs, strict=True)]
    # An expanded, hence non-contiguous, upstream gradient arrives from sums in real models.
    torch.cat([y * g for y, g in zip(ys, grads, strict=True)], -1).sum().backward()
    torch.testing.assert_close(local_x.grad, cut(x.grad, axis, sequence_parallel), **EXACT)
    own = summed_gradients(layer)
    for output, w, b in zip(outputs, weights, biases, strict=True):
        for kind_name, tensor in (("weight", w), ("bias", b)):
            torch.testing.assert_close(
                own[f"{output.name}.{kind_name}"],
                own_rows(tensor.grad, output, axis),
                **EXACT,
            )


def check_row(kind, sequence_parallel, compiled):
    axis, _ = axis_of(kind)
    features = 3 * axis.size
    layer = RowParallelLinear(
        features,
        D,
        bias=True,
        axis=axis,
        sequence_parallel=sequence_parallel,
        dtype=torch.float64,
    )
    fill(layer)
    torch.compiler.reset()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer

    (weight,) = whole_weight((LinearOutput("", D),), "weight", features)
    (bias,) = whole_weight((LinearOutput("", D),), "bias")
    x = normal("x", S, B, features).requires_grad_()
    upstream = normal("grad", S, B, D)
    expected = F.linear(x, weight, bias)
    expected.backward(upstream)

    local_x = non_contiguous(x.detach().chunk(axis.size, -1)[axis.rank]).requires_grad_()
    y = run(local_x)
    torch.testing.assert_close(y, cut(expected, axis, sequence_parallel), **EXACT)
    y.backward(non_contiguous(cut(upstream, axis, sequence_parallel)))
    torch.testing.assert_close(local_x.grad, x.grad.chunk(axis.size, -1)[axis.rank], **EXACT)
    own = summed_gradients(layer)
    torch.testing.assert_close(
        own["weight"], weight.grad.chunk(axis.size, 1)[axis.rank], **EXACT
    )
    torch.testing.assert_close(own["bias"], bias.grad, **EXACT)


def check_all():
    for kind in ("neighbours", "strided", "four"):
        for sequence_parallel in (False, True):
            check_column(kind, sequence_parallel, compiled=False)
            check_row(kind, sequence_parallel, compiled=False)


def check_compiled():
    for kind, sequence_parallel in (
        ("neighbours", False),
        ("neighbours", True),
        ("single", True),
    ):
        check_column(kind, sequence_parallel, compiled=True)
        check_row(kind, sequence_parallel, compiled=True)


def test_linears_equal_plain_ones_over_neighbours_strided_ranks_and_shared_kv_rows():
    run_ranks(check_all, 4)


def test_compiled_linears_equal_plain_ones():
    run_ranks(check_compiled, 2, check_shapes=False)


def test_linears_over_one_rank_are_plain():
    check_column("single", True, compiled=False)
    check_row("single", True, compiled=False)


def test_rows_that_do_not_divide_are_refused_with_the_sizes():
    axis = Axis("tp", 4, 0, None, (0, 1, 2, 3))
    with pytest.raises(
        ValueError,
        match=r"^column-parallel linear: 6 rows .* over 4 parts of axis tp: use a mul",
    ):
        ColumnParallelLinear(D, 6, axis=axis)
    with pytest.raises(ValueError, match=r"^output 'q': 6 rows cannot be split over 4 parts"):
        ColumnParallelLinear(D, [LinearOutput("q", 6)], axis=axis)
    with pytest.raises(ValueError, match="6 input features cannot be split over axis tp"):
        RowParallelLinear(6, D, axis=axis)
    with pytest.raises(ValueError, match="blocks of 3 replicas do not divide axis tp of 4"):
        ColumnParallelLinear(
            D, [LinearOutput("k", 6, Axis("tp_block_3", 3, 0, None, (0, 1, 2)))], axis=axis
        )


def test_shares_of_every_rank_make_the_weight_of_one_rank_bitwise():
    alone = ColumnParallelLinear(D, (LinearOutput("q", 8), LinearOutput("k", 4)), bias=True)
    alone.reset_parameters(seed=5)
    row_alone = RowParallelLinear(8, D)
    row_alone.reset_parameters(seed=5)
    for rank in range(4):
        axis = Axis("tp", 4, rank, None, (0, 1, 2, 3))
        block = Axis("tp_block_2", 2, rank % 2, None, (0, 1))
        layer = ColumnParallelLinear(
            D, (LinearOutput("q", 8), LinearOutput("k", 4, block)), bias=True, axis=axis
        )
        layer.reset_parameters(seed=5)
        q, k = layer.weight.split(layer.output_sizes)
        whole_q, whole_k = alone.weight.split(alone.output_sizes)
        assert torch.equal(q, whole_q[2 * rank : 2 * rank + 2])
        assert torch.equal(k, whole_k[2 * (rank // 2) : 2 * (rank // 2) + 2])
        assert not layer.bias.any()
        row = RowParallelLinear(8, D, axis=axis)
        row.reset_parameters(seed=5)
        assert torch.equal(row.weight, row_alone.weight[:, 2 * rank : 2 * rank + 2])
    assert not torch.equal(*(w[:4] for w in alone.weight.split(alone.output_sizes)))


def test_a_layer_of_std_zero_draws_nothing():
    before = torch.get_rng_state()
    layer = RowParallelLinear(8, D, init_std=0.0, bias=True)
    assert not layer.weight.any()
    assert torch.equal(before, torch.get_rng_state())
    assert RowParallelLinear(8, D).weight.any()
    assert not torch.equal(before, torch.get_rng_state())


def test_frozen_weights_get_no_gradient_and_inputs_still_do():
    layer = ColumnParallelLinear(D, 4)
    layer.weight.requires_grad_(False)
    x = torch.randn(S, B, D, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(S, B, D))


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_weight_gradient_goes_into_main_grad_where_there_is_one(recomputed):
    layer = ColumnParallelLinear(D, 4, bias=True, dtype=torch.bfloat16)
    twin = ColumnParallelLinear(D, 4, bias=True, dtype=torch.float32)
    twin.load_state_dict(layer.state_dict())
    grad_slot(layer.weight).main = torch.ones(4, D)
    calls = []
    grad_slot(layer.weight).on_ready = lambda: calls.append("ready")
    x = torch.randn(S, B, D, generator=torch.Generator().manual_seed(0)).bfloat16()
    for _ in range(2):
        y = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        y.backward(torch.ones_like(y))
        twin(x.float()).sum().backward()
    assert layer.weight.grad is None
    assert calls == ["ready", "ready"]
    # bf16 factors, float32 sums: only their order differs.
    torch.testing.assert_close(
        grad_slot(layer.weight).main, 1 + twin.weight.grad, rtol=1e-5, atol=0
    )
    assert torch.equal(layer.bias.grad.float(), twin.bias.grad)


def deferred_gradients(sequence_parallel):
    """Gradients of a column and a row made at once and made later, and when they come."""
    axis = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2)).tp
    made = []
    for queue in (None, WeightQueue()):
        options = {
            "axis": axis,
            "sequence_parallel": sequence_parallel,
            "dtype": torch.float64,
        }
        column = ColumnParallelLinear(D, 8, bias=True, **options)
        row = RowParallelLinear(8, D, bias=True, **options)
        if queue is not None:
            queue.attach(nn.Sequential(column, row))
        for layer in (column, row):
            fill(layer)
            grad_slot(layer.weight).main = torch.zeros_like(layer.weight)
        x = cut(normal("x", S, B, D), axis, sequence_parallel).clone().requires_grad_()
        y = row(column(x))
        y.backward(cut(normal("y", S, B, D), axis, sequence_parallel))
        if queue is not None:
            assert not grad_slot(column.weight).main.any()
            assert not grad_slot(row.weight).main.any()
            with torch.no_grad():  # as the pipeline calls them
                for work, prepare in queue.take():
                    prepare()
                    work()
        made.append(
            [
                x.grad,
                grad_slot(column.weight).main,
                grad_slot(row.weight).main,
                column.bias.grad,
                row.bias.grad,
            ]
        )
        assert column.weight.grad is None
    for later, at_once in zip(*made, strict=True):
        assert at_once.any()
        assert torch.equal(later, at_once)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_weight_gradients_put_off_are_those_made_at_once(sequence_parallel):
    run_ranks(deferred_gradients, 2, sequence_parallel)
