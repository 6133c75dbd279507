"""Contexts: every axis talks to its own ranks, several live at once, none outlives destroy."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from warm_ranks import run_ranks

from mcore_parallel import mesh
from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.rank_grid import build_grids

TP2_CP2_PP2 = ParallelConfig(
    tensor_model_parallel_size=2,
    context_parallel_size=2,
    pipeline_model_parallel_size=2,
    expert_model_parallel_size=4,
    expert_tensor_parallel_size=1,
)
TP4 = ParallelConfig(tensor_model_parallel_size=4, num_distributed_optimizer_instances=2)
PP4 = ParallelConfig(pipeline_model_parallel_size=4)


def axes_of(ctx):
    """Every axis a context offers, by a name of ours."""
    products = [("tp", "cp"), ("tp", "dp"), ("tp", "pp"), ("cp", "pp"), ("dp", "cp", "tp")]
    products += [("expert_tp", "ep"), ("ep", "expert_dp"), ("expert_tp", "ep", "expert_dp")]
    axes = {"_".join(names): ctx.axis(*names) for names in products}
    own = ("world", "tp", "cp", "dp", "pp", "pp_back", "dp_cp", "ep", "expert_tp", "expert_dp")
    own += ("optimizer_shard", "optimizer_replica", "embedding_ends")
    own += ("expert_optimizer_shard", "expert_optimizer_replica")
    return axes | {name: getattr(ctx, name) for name in own}


def check_sums(ctx):
    """Sum global ranks over every axis: the sum tells who answered."""
    for name, axis in axes_of(ctx).items():
        assert axis.ranks[axis.rank] == dist.get_rank(), name
        assert (axis.group is None) == (axis.size == 1), name
        mine = torch.tensor([2.0 ** dist.get_rank()])
        expected = torch.tensor([sum(2.0**r for r in axis.ranks)])
        assert torch.equal(all_reduce(mine, axis), expected), name


def context_with_settings(path):
    """Build under settings for nccl, which gloo has none of; say which axes share a group."""
    config = ParallelConfig(nccl_communicator_config_path=path)
    ctx = ParallelContext.build(config, compare_calls=True)
    check_sums(ctx)
    groups = ctx.world.group, ctx.dp_cp.group, ctx.optimizer_shard.group, ctx.dp.group
    ctx.destroy()
    return groups[0] is groups[3], groups[0] is groups[1], groups[1] is groups[2]


def test_an_axis_with_settings_for_nccl_has_a_group_of_its_own(tmp_path):
    file = tmp_path / "nccl.toml"
    file.write_text("[dp_cp]\nmax_ctas = 8\n")
    assert run_ranks(context_with_settings, 2, str(file)) == [(True, False, True)] * 2


def two_contexts():
    first, second = ParallelContext.build(TP2_CP2_PP2), ParallelContext.build(TP4)
    for ctx in (first, second, first):
        check_sums(ctx)
    layout = {name: axis.ranks for name, axis in axes_of(first).items()}
    second.destroy()
    check_sums(first)
    assert not [g for g in (first.tp.group, first.pp.group) if g is None]
    first.destroy()
    third = ParallelContext.build(PP4)
    check_sums(third)
    fourth = ParallelContext.build(PP4, embedding_stages=(0, 2, 3))
    check_sums(fourth)
    return layout, third.embedding_ends.ranks, fourth.embedding_ends.ranks


def test_two_contexts_live_in_one_process_and_each_axis_reaches_its_own_ranks():
    answers = run_ranks(two_contexts, 8)
    dense, expert = build_grids(TP2_CP2_PP2, 8)
    for rank, (layout, ends, placed) in enumerate(answers):
        for name, grid, axes in (
            ("tp", dense, ("tp",)),
            ("cp", dense, ("cp",)),  # strided: {0, 2}, {1, 3}, ...
            ("pp", dense, ("pp",)),
            ("dp_cp", dense, ("dp", "cp")),
            ("tp_pp", dense, ("tp", "pp")),
            ("ep", expert, ("ep",)),
            ("expert_tp_ep", expert, ("expert_tp", "ep")),
        ):
            (group,) = [g for g in grid.groups(axes) if rank in g]
            assert layout[name] == group, name
        # Four stages of two ranks: the outer two are the ends, the inner two stand alone.
        is_end = rank // 2 in (0, 3)
        assert ends == ((rank % 2, rank % 2 + 6) if is_end else (rank,))
        one = rank % 2
        assert placed == ((rank,) if rank // 2 == 1 else (one, one + 4, one + 6))


def blocks_and_instances():
    ctx = ParallelContext.build(TP4)
    axes = [ctx.tp_block(1), ctx.tp_block(2), ctx.tp_block(4)]
    with pytest.raises(KeyError):
        ctx.tp_block(3)
    of_ranks = ParallelContext.of_tensor_ranks(ctx.tp, torch.device("cpu"))
    assert (of_ranks.tp, of_ranks.tp_block(1).size, of_ranks.dp.size) == (ctx.tp, 1, 1)
    one = ParallelConfig(num_distributed_optimizer_instances=2)
    data = ParallelContext.build(one)
    assert data.data_axes() == {"dense": data.dp_cp, "expert": data.expert_dp}
    axes += [data.optimizer_shard, data.optimizer_replica]
    axes += [data.expert_optimizer_shard, data.expert_optimizer_replica]
    return [axis.ranks for axis in axes]


def test_tensor_blocks_are_neighbours_and_optimizer_instances_consecutive():
    answers = run_ranks(blocks_and_instances, 8)
    for rank, (alone, pair, four, shard, replica, *expert) in enumerate(answers):
        assert alone == (rank,)
        assert pair == tuple(rank // 2 * 2 + i for i in range(2))
        assert four == tuple(rank // 4 * 4 + i for i in range(4))
        assert shard == four
        assert replica == (rank % 4, rank % 4 + 4)
        assert expert == [shard, replica]


def destroyed():
    before = set(dist.distributed_c10d._world.pg_names.values())
    ctx = ParallelContext.build(TP2_CP2_PP2)
    during = set(dist.distributed_c10d._world.pg_names.values())
    ctx.destroy()
    ctx.destroy()
    after = set(dist.distributed_c10d._world.pg_names.values())
    return len(during - before), after - before


def doubled_in_two_contexts():
    """Of a DTensor over each, the first destroyed before the second is built."""
    found = []
    for _ in range(2):
        ctx = ParallelContext.build(ParallelConfig())
        over = DeviceMesh.from_group(ctx.dp.group, "cpu")
        tensor = distribute_tensor(torch.arange(4.0), over, [Shard(0)])
        found.append((tensor * 2).full_tensor().tolist())
        ctx.destroy()
    return found


def test_a_mesh_over_a_context_is_none_of_one_that_was_destroyed():
    assert run_ranks(doubled_in_two_contexts, 2) == [[[0.0, 2.0, 4.0, 6.0]] * 2] * 2


def test_destroy_leaves_no_group_behind_and_may_be_repeated():
    for made, left in run_ranks(destroyed, 8):
        assert made > 3
        assert not left


def sums_of_rebuilt_grids():
    """Ranks 1 and 2 build again and again; rank 2 is in one group more than rank 1."""
    rank, sums = dist.get_rank(), []
    other = ParallelContext.build(ParallelConfig(), ranks=(0, 2)) if rank != 1 else None
    for _ in range(3 if rank else 0):
        ctx = ParallelContext.build(ParallelConfig(distributed_timeout_minutes=1), ranks=(1, 2))
        sums.append(all_reduce(torch.tensor([2.0**rank]), ctx.world).item())
        ctx.destroy()
    if other is not None:
        other.destroy()
    return sums


def test_a_grid_over_some_ranks_is_built_again_after_it_was_destroyed():
    assert run_ranks(sums_of_rebuilt_grids, 3) == [[], [6.0] * 3, [6.0] * 3]


def seconds_until_all_are_built(late_by_s):
    if dist.get_rank() == 1:
        make = dist.new_group

        def make_and_rest(*args, **kwargs):
            group = make(*args, **kwargs)
            time.sleep(late_by_s)
            return group

        dist.new_group = make_and_rest
    began = time.monotonic()
    try:
        ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
        return time.monotonic() - began
    finally:
        if dist.get_rank() == 1:
            dist.new_group = make


def test_no_rank_has_its_groups_before_all_are_connected():
    for seconds in run_ranks(seconds_until_all_are_built, 2, 0.5):
        assert seconds > 0.5


def wrong_degrees():
    before = len(dist.distributed_c10d._world.pg_names)
    with pytest.raises(ValueError, match="does not divide the world of 2 ranks"):
        ParallelContext.build(ParallelConfig(tensor_model_parallel_size=4))
    return len(dist.distributed_c10d._world.pg_names) - before


def test_degrees_that_do_not_fit_are_refused_on_every_rank_before_any_group():
    assert run_ranks(wrong_degrees, 2) == [0, 0]


def axes_over_groups_of_ones_own():
    mine = dist.get_rank()
    group = dist.new_group([1, 0])
    sums = all_reduce(torch.ones(1), Axis("tp", 2, mine, group, (0, 1))).item()
    refused = 0
    for size, rank in ((2, 1 - mine), (4, mine), (1, 0)):
        with pytest.raises(ValueError, match=f"has this process as rank {mine} of 2"):
            Axis("tp", size, rank, group, tuple(range(size)))
        refused += 1
    with pytest.raises(ValueError, match="axis tp has 2 ranks and no group"):
        all_reduce(torch.ones(1), Axis("tp", 2, mine, None, (0, 1)))
    return sums, refused


def test_an_axis_has_the_size_and_the_order_of_its_group():
    assert run_ranks(axes_over_groups_of_ones_own, 2) == [(2.0, 3)] * 2


def test_on_gpus_numbers_on_the_host_are_exchanged_over_the_world_and_tensor_ranks():
    names = ("world", "tp", "dp", "tp_dp")
    backends = [mesh._backend(name, torch.device("cuda")) for name in names]
    assert backends == ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "nccl", "nccl"]
    assert mesh._backend("tp", torch.device("cpu")) == "gloo"


def test_without_a_world_a_context_is_one_rank_and_has_no_group():
    for ctx in (ParallelContext.build(ParallelConfig()), ParallelContext.single()):
        for axis in axes_of(ctx).values():
            assert (axis.size, axis.rank, axis.group, axis.ranks) == (1, 0, None, (0,))
        assert ctx.tp_block(1).size == 1
        ctx.destroy()


def test_a_rank_that_has_not_joined_its_launchers_world_is_told_to(monkeypatch):
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="WORLD_SIZE=2, but this process has joined no world"):
        ParallelContext.build(ParallelConfig())
    assert ParallelContext.single().world.size == 1


def test_unknown_products_and_groups_of_one_rank_are_refused():
    ctx = ParallelContext.single()
    with pytest.raises(KeyError, match="no axis"):
        ctx.axis("tp", "ep")
    with pytest.raises(ValueError, match="axis single has one rank and no group"):
        _ = SINGLE.group_name
