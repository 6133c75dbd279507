"""Calls of the ranks of a group are compared while they are new."""

import pytest
import torch

from mcore_parallel.launch.call_checks import CHECKED_CALLS, Agreement, DisagreementError, agree


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
    assert str(caught.value).count("test_call_checks.py") == 2


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


def test_messages_of_two_ranks_are_compared_in_their_order(pair):
    sender, receiver = pair
    first, second = (receiver.expect_message(0, torch.ones(n)) for n in (2, 3))
    for n in (2, 4):
        sender.announce_message(1, torch.ones(n))
    first()
    with pytest.raises(DisagreementError, match=r"\[4\] float32 is sent .* \[3\]") as caught:
        second()
    assert "ranks 4 and 6" in str(caught.value)
    assert str(caught.value).count("test_call_checks.py") == 2


def test_a_message_that_does_not_come_is_told_with_its_sender(pair):
    compare = pair[1].expect_message(0, torch.ones(2))
    with pytest.raises(RuntimeError, match=r"rank 6 expects .* rank 4 sent nothing within"):
        compare()


class GoneStore(torch.distributed.HashStore):
    """A store whose rank has died."""

    def wait(self, *_):
        raise torch.distributed.DistNetworkError("connection reset")


def test_a_store_that_is_gone_is_not_told_as_a_timeout():
    agreement = Agreement(GoneStore(), "g", (4, 6), 1, timeout_s=600.0)
    with pytest.raises(RuntimeError, match="did not come before the store was gone"):
        agreement.check("all_reduce (sum)", torch.ones(1))


def test_after_the_first_messages_of_two_ranks_nothing_is_compared(pair):
    pair[1].num_messages[0, 1] = CHECKED_CALLS
    assert pair[1].expect_message(0, torch.ones(2)) is None
    pair[0].num_messages[0, 1] = CHECKED_CALLS
    pair[0].announce_message(1, torch.ones(2))
    assert pair[0].store.num_keys() == 0
