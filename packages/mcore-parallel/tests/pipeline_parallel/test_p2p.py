"""Messages between neighbours: both ways in one batch, and several in order."""

import pytest
import torch
from warm_ranks import run_ranks

from mcore_parallel.config import ParallelConfig
from mcore_parallel.launch.call_checks import DisagreementError
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.p2p import Message, post, post_each


def around_the_ring():
    """Every rank sends two messages on and one back, all in one batch."""
    pp = ParallelContext.build(ParallelConfig(pipeline_model_parallel_size=3)).pp
    after, before = (pp.rank + 1) % 3, (pp.rank - 1) % 3
    own = torch.full((2,), float(pp.rank))
    first, second, back = torch.empty(2), torch.empty(3), torch.empty(2)
    posted = post(
        [
            Message(own, after, is_send=True),
            Message(torch.full((3,), 10.0 + pp.rank), after, is_send=True),
            Message(first, before, is_send=False),
            Message(second, before, is_send=False),
            Message(100.0 + own, before, is_send=True),
            Message(back, after, is_send=False),
        ],
        pp,
    )
    posted.wait()
    posted.wait()  # a second wait finds nothing left
    return first.tolist(), second.tolist(), back.tolist()


def test_messages_both_ways_in_one_batch_arrive_in_order():
    for rank, (first, second, back) in enumerate(run_ranks(around_the_ring, 3)):
        before, after = (rank - 1) % 3, (rank + 1) % 3
        assert first == [before] * 2
        assert second == [10 + before] * 3
        assert back == [100 + after] * 2


def send_too_few_rows(batched):
    """Rank 0 sends two rows where rank 1 expects three, which gloo would not notice."""
    config = ParallelConfig(pipeline_model_parallel_size=2)
    ctx = ParallelContext.build(config, compare_calls=True)
    own = torch.ones(2 + ctx.pp.rank, 4)
    messages = [Message(own, 1 - ctx.pp.rank, is_send=ctx.pp.rank == 0)]
    found = ""
    try:
        for posted in [post(messages, ctx.pp)] if batched else post_each(messages, ctx.pp):
            posted.wait()
    except DisagreementError as error:
        found = str(error)
    ctx.destroy()
    return found


@pytest.mark.parametrize("batched", [True, False])
def test_a_message_of_another_shape_is_refused_before_it_is_read(batched):
    sender, receiver = run_ranks(send_too_few_rows, 2, batched)
    assert sender == ""
    assert "ranks 0 and 1 disagree on a message: [2, 4] float32 is sent at" in receiver
    assert "[3, 4] float32 is expected" in receiver
