"""Messages between neighbours: both ways in one batch, and several in order."""

import torch

from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.p2p import Message, post
from mcore_parallel.testing import run_ranks


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
