"""Degrees of parallelism are checked one by one, and never change."""

from dataclasses import FrozenInstanceError

import pytest

from mcore_parallel.config import ParallelConfig


@pytest.mark.parametrize(
    "field",
    [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "num_distributed_optimizer_instances",
    ],
)
@pytest.mark.parametrize("bad", [0, -2])
def test_a_degree_below_one_is_refused_by_its_flag(field, bad):
    with pytest.raises(
        ValueError, match=f"--{field.replace('_', '-')} {bad} must be 1 or more"
    ):
        ParallelConfig(**{field: bad})


def test_expert_tensor_size_may_be_zero_but_not_negative():
    assert ParallelConfig(expert_tensor_parallel_size=0).expert_tensor_parallel_size == 0
    with pytest.raises(ValueError, match="--expert-tensor-parallel-size -1 must be 0"):
        ParallelConfig(expert_tensor_parallel_size=-1)


def test_a_timeout_of_nothing_is_refused():
    with pytest.raises(ValueError, match="--distributed-timeout-minutes"):
        ParallelConfig(distributed_timeout_minutes=0.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"cp_comm_type": "ring", "context_parallel_size": 2},
            "use p2p, all_gather, a2a or a2a\\+p2p",
        ),
        (
            {"cp_comm_type": "a2a+p2p", "context_parallel_size": 8},
            "sizes is not given: .* product is --context-parallel-size 8, such as 2 4",
        ),
        (
            {
                "cp_comm_type": "a2a+p2p",
                "context_parallel_size": 4,
                "hierarchical_context_parallel_sizes": (4, 1),
            },
            "sizes 4 1: .* two sizes of 2 or more",
        ),
        (
            {
                "cp_comm_type": "a2a",
                "context_parallel_size": 4,
                "hierarchical_context_parallel_sizes": (2, 2),
            },
            "no effect without --cp-comm-type a2a\\+p2p",
        ),
        ({"cp_comm_type": "a2a"}, "no effect with --context-parallel-size 1"),
        (
            {"expert_model_parallel_size": 4, "hierarchical_expert_parallel_size": 4},
            "must be a divisor of --expert-model-parallel-size 4 other than",
        ),
        (
            {
                "expert_model_parallel_size": 4,
                "hierarchical_expert_parallel_size": 2,
                "tensor_model_parallel_size": 2,
            },
            "use --expert-tensor-parallel-size 1",
        ),
        ({"rank_order": "tp-cp-dp-pp"}, "must name each of tp, cp, ep, dp, pp once"),
        ({"rank_order": "tp-tp-cp-dp-pp"}, "must name each of"),
        (
            {"rank_order": "tp-cp-ep-dp-pp", "use_tp_pp_dp_mapping": True},
            "--use-tp-pp-dp-mapping and --rank-order tp-cp-ep-dp-pp exclude each other",
        ),
    ],
)
def test_words_that_mean_nothing_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ParallelConfig(**options)


def test_nobody_writes_to_a_config():
    with pytest.raises(FrozenInstanceError):
        ParallelConfig().context_parallel_size = 2
