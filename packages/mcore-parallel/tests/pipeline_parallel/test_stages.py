"""Splitting layers over stages: every layer once, in order, as flags and layouts say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_parallel.pipeline_parallel.stages import build_stages, split_layers, stages_of_rank


def counts(stages):
    return [len(stage.layers) for stage in stages]


@given(pp=st.integers(2, 6), vpp=st.integers(1, 4), each=st.integers(1, 5))
def test_even_stages_hold_every_layer_once_and_in_order(pp, vpp, each):
    stages = split_layers(pp * vpp * each, pp, vpp=vpp)
    assert [layer for s in stages for layer in s.layers] == list(range(pp * vpp * each))
    assert [s.index for s in stages] == list(range(pp * vpp))
    assert [s.has_embedding for s in stages] == [True] + [False] * (pp * vpp - 1)
    assert [s.has_loss for s in stages] == [False] * (pp * vpp - 1) + [True]


def test_one_rank_holds_everything():
    (stage,) = split_layers(3, 1)
    assert (stage.layers, stage.has_embedding, stage.has_loss) == (range(3), True, True)


def test_chunks_of_a_rank_are_a_pipeline_apart():
    mine = stages_of_rank(split_layers(8, 2, vpp=2), rank=1)
    assert [s.layers for s in mine] == [range(2, 4), range(6, 8)]


def test_the_first_rank_of_a_v_holds_both_ends():
    stages = build_stages(PipelineConfig(pipeline_schedule="zb-v"), 12, 3)
    first, last = stages_of_rank(stages, 0), stages_of_rank(stages, 2)
    assert [s.layers for s in first] == [range(2), range(10, 12)]
    assert [s.layers for s in last] == [range(4, 6), range(6, 8)]
    assert (first[0].has_embedding, first[1].has_loss) == (True, True)
    uneven = split_layers(10, 2, vpp=2, first=6, v_shaped=True)
    assert counts(uneven) == [3, 2, 2, 3]


def test_first_and_last_ranks_may_hold_fewer_layers():
    assert counts(split_layers(14, 4, first=3, last=1)) == [3, 5, 5, 1]
    assert counts(split_layers(10, 4, first=1)) == [1, 3, 3, 3]
    assert counts(split_layers(6, 2, first=4, last=2)) == [4, 2]
    assert counts(split_layers(12, 2, vpp=2, first=4)) == [2, 4, 2, 4]


def test_embedding_and_loss_may_count_as_layers():
    assert counts(split_layers(14, 4, account_for_embedding=True, account_for_loss=True)) == [
        3,
        4,
        4,
        3,
    ]
    assert counts(split_layers(7, 2, vpp=2, account_for_loss=True)) == [2, 2, 2, 1]


def test_a_layout_spells_the_stages_out():
    stages = split_layers(61, 16, vpp=2, layout="Et*3|(tt|)*29,m|L")
    assert counts(stages) == [3] + [2] * 29 + [0, 0]
    assert [s.num_mtp_layers for s in stages] == [0] * 30 + [1, 0]
    assert [s.index for s in stages if s.has_mtp] == [30]
    assert [s.has_mtp for s in split_layers(4, 2)] == [False, True]
    assert stages[0].has_embedding
    assert stages[-1].has_loss
    assert counts(split_layers(4, 4, layout="E|(t|t)*2L")) == [0, 1, 2, 1]


def test_the_config_carries_every_way_of_splitting():
    config = PipelineConfig(decoder_first_pipeline_num_layers=1)
    assert counts(build_stages(config, 3, 2)) == [1, 2]
    config = PipelineConfig(account_for_embedding_in_pipeline_split=True)
    assert counts(build_stages(config, 3, 2)) == [1, 2]
    config = PipelineConfig(pipeline_model_parallel_layout="Ett|tL")
    assert counts(build_stages(config, 3, 2)) == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((10, 4), {}, "--num-layers 10 cannot be split over --pipeline-model-parallel-size 4"),
        ((4, 4), {"vpp": 2}, "use a multiple of 8"),
        ((9, 2), {"account_for_loss": True, "vpp": 2}, "embedding and loss as layers"),
        ((4, 1), {"vpp": 2}, "needs --pipeline-model-parallel-size 2"),
        ((4, 1), {"first": 2}, "need --pipeline-model-parallel-size 2"),
        ((8, 4), {"first": 3}, "leave 5 of --num-layers 8 for 3 pipeline ranks"),
        ((4, 2), {"first": 3, "last": 2}, "leave -1 of --num-layers 4"),
        ((9, 2), {"first": 3, "vpp": 2}, "3 layers of a pipeline rank cannot be split"),
        ((4, 2), {"layout": "Ett|t|tL", "vpp": 2}, "describes 3 stages.* write 4 stages"),
        ((4, 2), {"layout": "Et|t|t|tL"}, "use --num-virtual-stages-per-pipeline-rank 2"),
        ((4, 4), {"layout": "Et|tt|tL"}, "4 x .* 1 is 4: use --pipeline-model-parallel-size 3"),
        ((4, 2), {"layout": "Ett|tL"}, "holds 3 layers t, but --num-layers is 4"),
        ((4, 2), {"layout": "ttE|ttL"}, "one E first"),
        ((4, 2), {"layout": "Ett|tt"}, "then one L"),
        (
            (4, 3),
            {"layout": "Ett|ttm|mL"},
            "holds layers m on 2 stages: put all of them on one",
        ),
        ((4, 2), {"layout": "Ex*2|t*2L"}, "cannot be read at 'x'"),
        ((4, 2), {"layout": "E(t*9999)*9999|tL"}, "repeats tttt.* more than can be built"),
        ((4, 2), {"layout": "E(tt|ttL"}, r"cannot be read at '\('"),
    ],
)
def test_what_cannot_be_split_names_the_flags(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        split_layers(*arguments, **options)
