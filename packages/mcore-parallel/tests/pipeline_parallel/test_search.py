"""The search: the fastest schedule that fits, the same for equal arguments."""

import pytest

from mcore_parallel.pipeline_parallel.actions import DURATIONS
from mcore_parallel.pipeline_parallel.config import SCHEDULES, PipelineConfig
from mcore_parallel.pipeline_parallel.schedule import build_schedule, one_f_one_b
from mcore_parallel.pipeline_parallel.search import Costs, search_schedules, search_table
from mcore_parallel.pipeline_parallel.simulator import simulate

AUTO = PipelineConfig(pipeline_schedule="auto")
FREE = dict.fromkeys(DURATIONS, 0.0)
GIB = 2**30


def memory_of(pipeline):
    sizes = {"1f1b": 10, "zb-h1": 11, "interleaved": 12, "zb-v": 20, "dualpipev": 21}
    return sizes[pipeline.pipeline_schedule] * GIB


def search(layers=24, pp=2, number=8, message=0.0, **options):
    costs = Costs(layer=DURATIONS, loss=FREE, message=message)
    return search_schedules(AUTO, layers, pp, number, costs, memory_of, **options)


def test_the_fastest_schedule_under_the_cap_is_first_and_what_cannot_be_used_says_why():
    every = search()
    assert {each.pipeline.pipeline_schedule for each in every} == set(SCHEDULES)
    assert every[0].name == "zb-v"
    assert every[-1].name == "1f1b"
    assert [each.time for each in every] == sorted(each.time for each in every)
    capped = search(cap_bytes=11.5 * GIB)
    assert [each.name for each in capped[:2]] == ["zb-h1", "1f1b"]
    assert "takes 20.0 GiB" in search_table(capped)
    refused = search(problem_of=lambda p: "not here" if p.splits_backward else "")
    assert refused[0].name == "interleaved x 4"
    few = {each.name: each.problem for each in search(layers=4, number=3)}
    assert "cannot be split" in few["interleaved x 3"]
    assert "needs 2 x --pipeline-model-parallel-size" in few["dualpipev"]
    assert search() == every


def test_long_messages_favour_few_stages():
    assert search(pp=4, message=9.0)[0].pipeline.num_chunks == 1


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_long_step_takes_as_long_as_its_part_says(name):
    found = {each.name: each for each in search(pp=3, number=40)}[name]
    chunks = found.pipeline.num_chunks
    layers = 24 // 3 // chunks
    whole = simulate(
        build_schedule(found.pipeline, 3, 40),
        num_microbatches=40,
        num_chunks=chunks,
        v_shaped=found.pipeline.v_shaped,
    )
    assert found.time == pytest.approx(layers * whole.makespan)
    assert found.bubble_fraction == pytest.approx(whole.bubble_fraction)


def test_a_message_delays_what_waits_for_it():
    found = simulate(one_f_one_b(2, 1), num_microbatches=1, message_time=0.5)
    assert found.makespan == 7.0
    assert found.spans[1][0].start == 1.5


def test_auto_itself_is_no_schedule():
    with pytest.raises(ValueError, match="choose one of search_schedules"):
        build_schedule(AUTO, 2, 4)
    for options, message in (
        ({"pipeline_memory_cap": "80"}, "no effect without --pipeline-schedule auto"),
        (
            {"pipeline_schedule": "auto", "num_virtual_stages_per_pipeline_rank": 2},
            "chooses the stages",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            PipelineConfig(**options)
