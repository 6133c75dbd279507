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


def test_nobody_writes_to_a_config():
    with pytest.raises(FrozenInstanceError):
        ParallelConfig().context_parallel_size = 2
