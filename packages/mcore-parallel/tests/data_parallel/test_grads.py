"""The norm counts each logical element once; clipping; sums over the right ranks."""

from dataclasses import replace

import pytest
import torch
from warm_ranks import run_ranks

from mcore_parallel.config import ParallelConfig
from mcore_parallel.data_parallel.grads import (
    clip_coefficient,
    grad_norm,
    owned_views,
    sum_partial_gradients,
    sum_tied_gradients,
)
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import (
    NamedParameter,
    ParamLayout,
    Part,
    Piece,
    Shard,
    named_shards,
    whole_layout,
)
from mcore_parallel.testing.ranks import gather_logical


def shard(data, *replicas):
    return Shard(
        tuple(data.shape), data.dtype, (Piece((0,), tuple(data.shape), data),), replicas
    )


def test_the_norm_is_that_of_all_elements_whatever_their_dtype():
    wide = torch.full((3,), 2.0, dtype=torch.float64)
    found = grad_norm([wide, torch.tensor([[3.0, 1.0]], dtype=torch.bfloat16)], SINGLE)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(22.0**0.5, rel=1e-7)
    assert grad_norm([wide], SINGLE).item() == pytest.approx(12.0**0.5, rel=1e-15)


def test_a_norm_of_half_precision_gradients_is_not_rounded_to_it():
    views = [torch.full((4096,), 0.01, dtype=torch.bfloat16) for _ in range(3)]
    expected = torch.cat(views).double().norm().item()
    assert grad_norm(views, SINGLE).item() == pytest.approx(expected, rel=1e-6)


def test_a_rank_without_gradients_has_norm_zero():
    assert grad_norm([], SINGLE).item() == 0.0


def norms_of_unequal_ranks():
    """Rank 0 holds no gradient, rank 1 a float64 one, rank 2 a float32 one."""
    world = ParallelContext.build(config(1)).world
    views = [
        [],
        [torch.full((5,), 2.0, dtype=torch.float64)],
        [torch.full((4,), 5.0)],
    ][world.rank]
    return grad_norm(views, world).item()


def config(tp):
    return ParallelConfig(tensor_model_parallel_size=tp)


def test_the_norm_is_one_over_ranks_that_hold_different_things():
    # Roots of sums, not sums or means of roots: sqrt(20) and 10 give sqrt(120).
    assert run_ranks(norms_of_unequal_ranks, 3) == [pytest.approx(120.0**0.5)] * 3


def replicas_counted_once():
    ctx = ParallelContext.build(config(2))
    replicated = shard(torch.full((3,), 2.0), ctx.tp, ctx.dp)
    split = shard(torch.full((2,), 1.0 + ctx.tp.rank), ctx.dp)
    return grad_norm(owned_views([replicated, split]), ctx.world).item()


def test_replicas_count_once_and_slices_all():
    # 3 x 2^2 once, and 2 x 1^2 + 2 x 2^2 of the two slices.
    assert run_ranks(replicas_counted_once, 4) == [pytest.approx(22.0**0.5)] * 4


@pytest.mark.parametrize(
    ("norm", "expected"), [(0.5, 1.0), (4.0, 2.0 / (4.0 + 1e-6)), (0.0, 1.0)]
)
def test_clipping_only_ever_shrinks(norm, expected):
    found = clip_coefficient(torch.tensor(norm, dtype=torch.float64), 2.0)
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_clipping_to_nothing_is_refused():
    with pytest.raises(ValueError, match=r"--clip-grad 0\.0 must be above 0"):
        clip_coefficient(torch.tensor(1.0), 0.0)


def partial_and_tied_sums():
    """Strided groups on purpose: tp is {0, 1}, {2, 3} and the other axis {0, 2}, {1, 3}."""
    ctx = ParallelContext.build(config(2))
    own = 10.0 ** torch.tensor(float(ctx.global_rank))
    norm = named("norm", whole_layout("norm", (2,), ctx.tp, ctx.tp))
    scale = named("scale", whole_layout("scale", (3,), ctx.dp, ctx.dp))
    rows = named("rows", partial_rows(ctx.tp))
    tied = named("tied", tie(whole_layout("tied", (2,)), ctx.dp))
    gradients = [(n, torch.full(tuple(n.parameter.shape), own.item())) for n in (norm, scale)]
    gradients += [(rows, torch.full((3, 2), own.item())), (tied, torch.full((2,), own.item()))]
    sum_partial_gradients(gradients)
    sum_tied_gradients(gradients)
    return {n.name: g for n, g in gradients}


def named(name, layout):
    shape = (3, 2) if name == "rows" else layout.parts[0].lengths
    return NamedParameter(name, torch.nn.Parameter(torch.zeros(shape)), layout)


def tie(layout, axis):
    return replace(layout, tied=axis)


def partial_rows(axis):
    """A fused parameter: its last two rows are partial, its first is whole."""
    return ParamLayout(
        (
            Part("q", (1, 2), (0, 0), (0, 0), (1, 2)),
            Part("k", (2, 2), (0, 0), (1, 0), (2, 2), axis, axis),
        )
    )


def test_partial_and_tied_gradients_are_summed_over_their_own_axes_only():
    for rank, found in enumerate(run_ranks(partial_and_tied_sums, 4)):
        own = 10.0**rank
        over_tp = 11.0 if rank < 2 else 1100.0
        over_dp = 101.0 if rank % 2 == 0 else 1010.0
        assert found["norm"].tolist() == [over_tp] * 2
        assert found["scale"].tolist() == [over_dp] * 3
        assert found["tied"].tolist() == [over_dp] * 2
        assert found["rows"].tolist() == [[own] * 2, [over_tp] * 2, [over_tp] * 2]


def differing_replicas():
    ctx = ParallelContext.build(config(2))
    value = torch.ones(2) + 1e-7 * ctx.tp.rank
    return gather_logical({"x": shard(value, ctx.tp)}, ctx.world)


def test_gathering_refuses_replicas_that_differ_by_one_bit():
    with pytest.raises(RuntimeError, match=r"replicas of x differ: rank 1 by 1\.19e-07"):
        run_ranks(differing_replicas, 2)


def test_gathering_refuses_holes_and_missing_owners():
    hole = Shard((4,), torch.float32, (Piece((1,), (2,), torch.ones(2)),))
    with pytest.raises(ValueError, match="x has 2 elements that no rank holds"):
        gather_logical({"x": hole}, SINGLE)
    twice = Shard((2,), torch.float32, (Piece((0,), (2,), torch.ones(2)),) * 2)
    with pytest.raises(ValueError, match="have 2 to 2 owners instead of one"):
        gather_logical({"x": twice}, SINGLE)


def test_gathering_assembles_a_module():
    linear = torch.nn.Linear(3, 2)
    found = gather_logical(named_shards(linear), SINGLE)
    assert torch.equal(found["weight"], linear.weight)
    assert torch.equal(found["bias"], linear.bias)
