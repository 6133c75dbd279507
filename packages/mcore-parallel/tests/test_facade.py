"""``parallel_state``: one layout for a whole program."""

import pytest
from warm_ranks import run_ranks

from mcore_parallel import parallel_state


@pytest.fixture
def one_rank():
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def test_a_plain_start_is_a_world_of_one(one_rank):
    assert parallel_state.model_parallel_is_initialized()
    assert parallel_state.get_tensor_model_parallel_world_size() == 1
    assert parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    assert parallel_state.get_tensor_model_parallel_group() is None
    assert parallel_state.is_pipeline_first_stage()
    assert parallel_state.is_pipeline_last_stage()


def test_a_second_layout_needs_the_first_destroyed(one_rank):
    with pytest.raises(RuntimeError, match="destroy_model_parallel"):
        parallel_state.initialize_model_parallel()


def test_questions_before_the_layout_are_refused():
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        parallel_state.get_tensor_model_parallel_rank()


def test_without_a_layout_one_rank_is_described():
    assert parallel_state.current_context().world.size == 1
    assert not parallel_state.model_parallel_is_initialized()


def places():
    """What a rank learns of itself in a world of tensor, pipeline and data ranks."""
    with pytest.raises(ValueError, match="does not divide the world of 4 ranks"):
        parallel_state.initialize_model_parallel(3)
    with pytest.raises(RuntimeError, match="4 ranks but no layout"):
        parallel_state.current_context()
    parallel_state.initialize_model_parallel(2, 2)
    kinds = ("tensor_model", "pipeline_model", "data", "context", "expert_model")
    found = {}
    for kind in kinds:
        size = getattr(parallel_state, f"get_{kind}_parallel_world_size")()
        rank = getattr(parallel_state, f"get_{kind}_parallel_rank")()
        group = getattr(parallel_state, f"get_{kind}_parallel_group")()
        assert (group is None) == (size == 1)
        found[kind] = (rank, size)
    found["ends"] = (
        parallel_state.is_pipeline_first_stage(),
        parallel_state.is_pipeline_last_stage(),
    )
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, context_parallel_size=2)
    found["again"] = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2, order="dp-tp-cp-ep-pp")
    found["data first"] = parallel_state.get_tensor_model_parallel_rank()
    parallel_state.destroy_model_parallel()
    return found


def test_ranks_learn_their_place_and_may_be_laid_out_again():
    for rank, found in enumerate(run_ranks(places, 4)):
        assert found["tensor_model"] == (rank % 2, 2)
        assert found["pipeline_model"] == (rank // 2, 2)
        assert found["data"] == found["context"] == found["expert_model"] == (0, 1)
        assert found["ends"] == (rank < 2, rank >= 2)
        assert found["again"] == 4
        assert found["data first"] == rank // 2
