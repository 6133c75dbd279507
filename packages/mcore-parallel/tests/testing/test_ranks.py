"""Ranks that the wheel starts for a program: results in order, failures named, none left."""

import os
import time

import pytest
import torch.distributed as dist

from mcore_parallel.testing.ranks import run_ranks


def act(kind):
    rank = dist.get_rank()
    if kind == "add":
        return rank, dist.get_world_size()
    if kind == "raise" and rank == 1:
        raise KeyError("the reason")
    if kind == "die" and rank == 1:
        os._exit(3)
    time.sleep(60.0)  # its peers wait for it
    return None


def test_results_come_back_in_rank_order():
    assert run_ranks(act, 2, "add") == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("kind", "timeout_s", "told"),
    [
        ("raise", 60.0, r"(?s)rank 1 of 2 failed.*KeyError: 'the reason'"),
        ("die", 60.0, "rank 1 of 2 died"),
        ("hang", 1.0, r"ranks .*of 2 gave no answer in 1.0 s"),
    ],
)
def test_a_rank_that_fails_ends_all_of_them(kind, timeout_s, told):
    with pytest.raises(RuntimeError, match=told):
        run_ranks(act, 2, kind, timeout_s=timeout_s)


def test_a_function_that_ranks_cannot_find_is_refused():
    with pytest.raises(ValueError, match="module-level function of a file"):
        run_ranks(lambda: None, 1)
