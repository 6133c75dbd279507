"""Ranks that know the same or fail together."""

import pytest
from warm_ranks import run_ranks

from mcore_ckpt.save_load.rank_agreement import gather_json, raise_on_all_ranks
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext


def test_one_rank_hears_itself_as_json_says_it():
    assert gather_json({"a": (1, 2)}, SINGLE) == [{"a": [1, 2]}]
    with pytest.raises(KeyError), raise_on_all_ranks(SINGLE):
        raise KeyError("own")


def test_values_of_any_size_reach_all_ranks_in_order():
    answers = run_ranks(gather_sizes, 3)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] == [[], ["x" * 1000] * 1, ["x" * 1000] * 2]


def gather_sizes():
    ctx = ParallelContext.build(ParallelConfig())
    told = gather_json(["x" * 1000] * ctx.world.rank, ctx.world)
    ctx.destroy()
    return told


def test_the_well_ranks_raise_what_the_others_said():
    answers = run_ranks(fail_on, 3, (1,), "value")
    assert answers[1] == ("ValueError", "rank 1 is unwell")
    assert answers[0] == ("ValueError", "1 of 3 ranks failed:\nrank 1: rank 1 is unwell")
    assert answers[0] == answers[2]
    answers = run_ranks(fail_on, 3, (0, 2), "world")
    assert answers[0][0] == "OSError"
    assert answers[1][0] == "CheckpointError"
    assert "rank 0: " in answers[1][1]
    assert "rank 2: " in answers[1][1]
    answers = run_ranks(fail_on, 3, (0, 2), "program")
    assert [name for name, _ in answers] == ["KeyError", "RuntimeError", "KeyError"]
    assert run_ranks(fail_on, 2, (), "none") == ["well", "well"]


def fail_on(ranks, kind):
    ctx = ParallelContext.build(ParallelConfig())
    try:
        with raise_on_all_ranks(ctx.world):
            if ctx.world.rank in ranks:
                kinds = {"value": ValueError, "world": OSError, "program": KeyError}
                raise kinds[kind](f"rank {ctx.world.rank} is unwell")
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        return type(error).__name__, str(error)
    finally:
        ctx.destroy()
    return "well"
