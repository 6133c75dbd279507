"""Rank arithmetic: groups obtained from Megatron's rank generator, and what always holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.config import ParallelConfig
from mcore_parallel.rank_grid import (
    DENSE_AXES,
    EXPERT_AXES,
    build_grids,
    consecutive_blocks,
    strided_blocks,
)


def config(tp=1, cp=1, pp=1, ep=1, etp=0, **others):
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        **others,
    )


def starts_with(groups, *expected):
    assert groups[: len(expected)] == [tuple(group) for group in expected]


# Every list of ranks in the next three tests was printed by Megatron-LM (August 2026) for the
# same degrees.


def test_dense_groups_of_16_ranks_are_megatrons():
    dense, _ = build_grids(config(tp=2, cp=2, pp=2), 16)
    starts_with(dense.groups(("tp",)), [0, 1], [2, 3])
    starts_with(dense.groups(("cp",)), [0, 2], [1, 3], [4, 6], [5, 7], [8, 10])
    starts_with(dense.groups(("dp",)), [0, 4], [1, 5], [2, 6], [3, 7], [8, 12])
    starts_with(dense.groups(("pp",)), [0, 8], [1, 9])
    starts_with(dense.groups(("dp", "cp")), [0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14])
    starts_with(dense.groups(("tp", "cp")), [0, 1, 2, 3], [4, 5, 6, 7])
    starts_with(dense.groups(("tp", "pp")), [0, 1, 8, 9], [2, 3, 10, 11])


def test_expert_groups_of_16_ranks_are_megatrons():
    _, expert = build_grids(config(tp=2, cp=2, pp=2, ep=4, etp=1), 16)
    starts_with(expert.groups(("ep",)), [0, 1, 2, 3], [4, 5, 6, 7])
    starts_with(expert.groups(("expert_dp",)), [0, 4], [1, 5])
    assert expert.groups(("expert_tp", "ep", "pp")) == [
        (0, 1, 2, 3, 8, 9, 10, 11),
        (4, 5, 6, 7, 12, 13, 14, 15),
    ]
    _, expert = build_grids(config(tp=2, cp=2, pp=2, ep=2, etp=2), 16)
    starts_with(expert.groups(("ep",)), [0, 2], [1, 3])
    starts_with(expert.groups(("expert_tp", "ep")), [0, 1, 2, 3])


def test_pipeline_before_data_order_is_megatrons():
    dense, _ = build_grids(config(tp=2, pp=2, use_tp_pp_dp_mapping=True), 8)
    starts_with(dense.groups(("dp",)), [0, 4], [1, 5])
    assert dense.groups(("pp",)) == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_any_order_of_the_axes_may_be_asked_for():
    dense, expert = build_grids(config(tp=2, cp=2, pp=2, rank_order="pp-dp-cp-tp-ep"), 16)
    assert dense.groups(("pp",))[:2] == [(0, 1), (2, 3)]
    assert dense.groups(("dp",))[:2] == [(0, 2), (1, 3)]
    assert dense.groups(("tp",))[:2] == [(0, 8), (1, 9)]
    assert expert.groups(("expert_dp",)) == dense.groups(("dp", "cp"))
    usual = build_grids(config(tp=2, pp=2, rank_order="tp-cp-ep-dp-pp"), 8)
    assert usual == build_grids(config(tp=2, pp=2), 8)
    mapped = build_grids(config(tp=2, pp=2, rank_order="tp-cp-ep-pp-dp"), 8)
    assert mapped == build_grids(config(tp=2, pp=2, use_tp_pp_dp_mapping=True), 8)


def test_copies_of_whole_experts_lie_where_those_of_dense_layers_do():
    degrees = {"tp": 2, "cp": 2, "pp": 2, "use_tp_pp_dp_mapping": True}
    dense, expert = build_grids(config(**degrees), 16)
    assert dense.groups(("pp",)) == expert.groups(("pp",)) != []
    assert dense.groups(("dp", "cp")) == expert.groups(("expert_dp",))
    assert expert.size("expert_dp") == 4
    copies = [expert.coordinates(rank)["expert_dp"] for rank in dense.groups(("dp", "cp"))[1]]
    assert copies == [0, 1, 2, 3]


@st.composite
def layouts(draw):
    size = st.integers(1, 3)
    tp, cp, dp, pp = (draw(size) for _ in range(4))
    etp = draw(st.sampled_from([d for d in range(1, 28) if tp * cp * dp % d == 0]))
    rest = tp * cp * dp // etp
    ep = draw(st.sampled_from([d for d in range(1, 28) if rest % d == 0]))
    order = "-".join([*draw(st.permutations(["tp", "cp", "ep", "dp"])), "pp"])
    degrees = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp, "rank_order": order}
    return degrees, tp * cp * dp * pp


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layouts(), st.data())
def test_groups_hold_exactly_the_ranks_that_differ_in_their_axes(degrees, data):
    sizes, world_size = degrees
    dense, expert = build_grids(config(**sizes), world_size)
    for grid, names in ((dense, DENSE_AXES), (expert, EXPERT_AXES)):
        axes = tuple(data.draw(st.sets(st.sampled_from(names), min_size=1)))
        groups = grid.groups(axes)
        assert sorted(r for group in groups for r in group) == list(range(grid.world_size))
        places = [grid.coordinates(rank) for rank in range(grid.world_size)]
        for group in groups:
            assert list(group) == sorted(group)
            fixed = {tuple(places[r][a] for a in names if a not in axes) for r in group}
            assert len(fixed) == 1
            assert len({tuple(places[r][a] for a in axes) for r in group}) == len(group)
    assert dense.groups(("pp",)) == expert.groups(("pp",))
    assert dense.world_size == expert.world_size


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_consecutive_and_strided_blocks_cross_in_one_rank(size, num_blocks, num_groups):
    groups = [tuple(range(g * 100, g * 100 + size * num_blocks)) for g in range(num_groups)]
    runs, combs = consecutive_blocks(groups, size), strided_blocks(groups, size)
    for blocks in (runs, combs):
        assert sorted(r for b in blocks for r in b) == sorted(r for g in groups for r in g)
    for run in runs:
        assert run == tuple(range(run[0], run[0] + size))
        for comb in combs:
            shared = set(run) & set(comb)
            assert len(shared) == (1 if run[0] // 100 == comb[0] // 100 else 0)


def test_blocks_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="blocks of 2 do not divide a group of 3"):
        consecutive_blocks([(0, 1, 2)], 2)


def test_an_axis_of_the_other_grid_is_refused():
    dense, expert = build_grids(config(), 1)
    with pytest.raises(KeyError, match="'ep'"):
        dense.groups(("tp", "ep"))
    with pytest.raises(KeyError, match="'dp'"):
        expert.groups(("dp",))


def test_a_world_that_is_no_multiple_says_how_many_ranks_to_start():
    with pytest.raises(ValueError, match=r"= 6 does not divide the world of 8 ranks. Start 6"):
        build_grids(config(tp=2, cp=3), 8)
    with pytest.raises(ValueError, match="--expert-model-parallel-size 3"):
        build_grids(config(ep=3), 8)


def test_pipelines_that_would_differ_between_the_grids_are_refused():
    build_grids(config(tp=2, pp=2, ep=2, etp=1, use_tp_pp_dp_mapping=True), 8)
    with pytest.raises(ValueError, match="TP\\*CP is 2 and expert TP\\*EP is 4"):
        build_grids(config(tp=2, pp=2, ep=2, etp=2, use_tp_pp_dp_mapping=True), 8)


def test_optimizer_instances_must_divide_both_data_sizes():
    build_grids(config(num_distributed_optimizer_instances=2), 8)
    with pytest.raises(ValueError, match=r"instances 3 must divide DP\*CP = 8"):
        build_grids(config(num_distributed_optimizer_instances=3), 8)
    with pytest.raises(ValueError, match="instances 4 must divide expert DP = 2"):
        build_grids(config(ep=4, num_distributed_optimizer_instances=4), 8)
