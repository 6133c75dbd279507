"""Calls of the ranks of a group are compared while they are new."""

import pytest
import torch

from mcore_parallel.agreeing import CHECKED_CALLS, Agreement, DisagreementError, agree


@pytest.fixture
def pair():
    """Two ranks of one group, in one process."""
    store = torch.distributed.HashStore()
    return [Agreement(store, "g", (4, 6), rank, timeout_s=0.2) for rank in (0, 1)]


def test_equal_calls_pass_and_are_counted(pair):
    for agreement in pair:
        agree(agreement, "all_reduce (sum)", torch.ones(2, 3))
    assert [agreement.num_calls for agreement in pair] == [1, 1]


@pytest.mark.parametrize(
    ("what", "x", "told"),
    [
        ("all_reduce (sum)", torch.ones(2, 4), r"\[2, 3\] float32 at .* but .* \[2, 4\]"),
        ("all_reduce (sum)", torch.ones(2, 3).double(), "float32 at .* float64"),
        ("all_reduce (max)", torch.ones(2, 3), r"\(sum\) of .* \(max\) of"),
    ],
)
def test_another_call_is_told_with_both_ranks_and_both_sites(pair, what, x, told):
    agree(pair[0], "all_reduce (sum)", torch.ones(2, 3))
    with pytest.raises(DisagreementError, match=told) as caught:
        agree(pair[1], what, x)
    assert "ranks 4 and 6" in str(caught.value)
    assert str(caught.value).count("test_agreeing.py") == 2


def test_rows_may_differ_where_they_are_meant_to(pair):
    agree(pair[0], "all_to_all", torch.ones(2, 3), any_rows=True)
    agree(pair[1], "all_to_all", torch.ones(5, 3), any_rows=True)


def test_a_first_rank_that_does_not_come_is_named(pair):
    with pytest.raises(RuntimeError, match="rank 4 did not come within"):
        agree(pair[1], "all_reduce (sum)", torch.ones(1))


def test_after_the_first_calls_nothing_is_compared(pair):
    pair[1].num_calls = CHECKED_CALLS
    agree(pair[1], "all_reduce (sum)", torch.ones(1))


def test_a_group_without_agreement_compares_nothing():
    agree(None, "all_reduce (sum)", torch.ones(1))
