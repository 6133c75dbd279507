"""Messages between neighbours on the pipeline axis, posted in batches or one by one.

``post`` starts messages and returns at once, on gloo and nccl alike. Messages carry no tags:
two ranks match sends and receives by the order in which they post them. A batch is one
operation of nccl, which ends when all of its messages have arrived. A message posted alone is
waited for alone, but both ranks must then post sends and receives in the same order. What is
posted over one group nccl does in that order: ``post_by_way`` has a group for each way, so
that what a rank is to receive does not hold back what it sends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from mcore_parallel.mesh import Axis


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor to send, or the memory for one to receive."""

    tensor: Shaped[Tensor, "..."]
    """Contiguous; the sender must not change it, nor the receiver read it, before ``wait``."""
    peer: int
    """Rank on the axis."""
    is_send: bool


class PendingMessages:
    """A batch of messages in flight; keeps their memory alive.

    Attributes:
        axis: that the messages use; ``watchdog`` reads it when a rank hangs in ``wait``.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        works: list[dist.Work],
        axis: Axis,
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Use ``post`` instead."""
        self._messages = list(messages)
        self._works = works
        self.axis, self._checks = axis, checks

    def wait(self) -> None:
        """Wait for all of the batch; on CUDA the current stream waits, not the host.

        Raises:
            DisagreementError: if a message is not what was expected; only the first ones of
                two ranks are compared (see ``call_checks``), for which the host waits.
        """
        checks, self._checks = self._checks, ()
        with self.axis.waiting():
            for check in checks:
                check()
            for work in self._works:
                work.wait()
        self._works, self._messages = [], []


def post_by_way(
    messages: Sequence[Message], axis: Axis, back: Axis, *, batched: bool = True
) -> list[PendingMessages]:
    """Start messages to higher ranks over ``axis``, those to lower ones over ``back``.

    Args:
        messages: in an order that suits ``post_each``, unless ``batched``.
        axis: ranks that take part; no other operation may use its group before the end.
        back: the same ranks over another group, or ``axis``.
        batched: post what goes one way by ``post``, else by ``post_each``.

    Returns:
        What to wait for, for each message.
    """
    posted: dict[int, PendingMessages] = {}
    ways = [(axis, back)[(each.peer < axis.rank) == each.is_send] for each in messages]
    for way in dict.fromkeys(ways):
        places = [place for place, each in enumerate(ways) if each is way]
        own = [messages[place] for place in places]
        pending = [post(own, way)] * len(own) if batched else post_each(own, way)
        posted |= zip(places, pending, strict=True)
    return [posted[place] for place in range(len(messages))]


def post_each(messages: Sequence[Message], axis: Axis) -> list[PendingMessages]:
    """Start to send and receive messages one by one, in their order.

    Args:
        messages: in the peers' order: a send has the place that its receive has on the peer.
        axis: ranks that take part; no other operation may use its group before the end.
    """
    pending = []
    for message in messages:
        checks = _announced([message], axis)
        start = dist.isend if message.is_send else dist.irecv
        work = start(message.tensor, axis.ranks[message.peer], group=axis.group)
        assert work is not None  # None: this rank is not of the group
        pending.append(PendingMessages([message], [work], axis, checks))
    return pending


def post(messages: Sequence[Message], axis: Axis) -> PendingMessages:
    """Start to send and receive a batch of messages.

    Args:
        messages: at least one; ranks that exchange both ways must do so in one batch.
        axis: ranks that take part; no other operation may use its group before the end.
    """
    checks = _announced(messages, axis)
    operations = [
        dist.P2POp(
            dist.isend if message.is_send else dist.irecv,
            message.tensor,
            axis.ranks[message.peer],
            group=axis.group,
        )
        for message in messages
    ]
    return PendingMessages(messages, dist.batch_isend_irecv(operations), axis, checks)


def _announced(messages: Sequence[Message], axis: Axis) -> list[Callable[[], None]]:
    """Announce sends to their receivers; return checks of the messages to receive."""
    agreement = axis.agreement
    if agreement is None:
        return []
    checks = []
    for message in messages:
        if message.is_send:
            agreement.announce_message(message.peer, message.tensor)
        else:
            checks.append(agreement.expect_message(message.peer, message.tensor))
    return [check for check in checks if check is not None]
