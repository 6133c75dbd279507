"""Messages between neighbours on the pipeline axis, posted in batches or one by one.

``post`` starts messages and returns at once, with gloo and with nccl. Messages carry no tags:
two ranks match sends and receives by the order in which they post them. A batch is one nccl
operation, which ends when all its messages have arrived. A message posted alone can be waited
for alone, but both ranks must then post their sends and receives in the same order. nccl runs
the operations of one group in the order of posting: ``post_by_direction`` uses one group for
each direction, so that a pending receive does not delay a send.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from mcore_parallel.mesh import Axis


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor to send, or the memory that receives a tensor."""

    tensor: Shaped[Tensor, "..."]
    """Contiguous; must not be changed (send) or read (receive) before ``wait``."""
    peer: int
    """Rank on the axis at the other end."""
    is_send: bool


class PendingMessages:
    """A batch of messages in flight, with references to their tensors.

    Attributes:
        axis: axis of the messages; ``watchdog`` reports it when a rank hangs in ``wait``.
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
        """Wait for all messages of the batch; on CUDA the current stream waits, not the host.

        Raises:
            DisagreementError: if the peer sends another shape or dtype; only the first messages
                of two ranks are compared (``call_checks``), and the host waits for these.
        """
        checks, self._checks = self._checks, ()
        with self.axis.waiting():
            for check in checks:
                check()
            for work in self._works:
                work.wait()
        self._works, self._messages = [], []


def post_by_direction(
    messages: Sequence[Message], axis: Axis, back: Axis, *, batched: bool = True
) -> list[PendingMessages]:
    """Start messages to higher ranks over ``axis`` and messages to lower ranks over ``back``.

    Args:
        messages: in an order that suits ``post_each``, unless ``batched``.
        axis: ranks that take part; no other operation may use its group meanwhile.
        back: the same ranks with another group, or ``axis``.
        batched: post the messages of each direction by ``post``, else by ``post_each``.

    Returns:
        For each message the object to wait for.
    """
    posted: dict[int, PendingMessages] = {}
    # A message goes back if this rank sends it to a lower rank or receives it from a higher
    # one.
    directions = [(axis, back)[(each.peer < axis.rank) == each.is_send] for each in messages]
    for direction in dict.fromkeys(directions):
        indices = [i for i, each in enumerate(directions) if each is direction]
        chosen = [messages[i] for i in indices]
        if batched:
            pending = [post(chosen, direction)] * len(chosen)
        else:
            pending = post_each(chosen, direction)
        posted |= zip(indices, pending, strict=True)
    return [posted[i] for i in range(len(messages))]


def post_each(messages: Sequence[Message], axis: Axis) -> list[PendingMessages]:
    """Start to send and receive messages one by one, in their order.

    Args:
        messages: in an order that the peers share: a send must have the position among the
            messages of the two ranks that its receive has on the peer.
        axis: ranks that take part; no other operation may use its group meanwhile.
    """
    pending = []
    for message in messages:
        checks = _announce([message], axis)
        start = dist.isend if message.is_send else dist.irecv
        work = start(message.tensor, axis.ranks[message.peer], group=axis.group)
        assert work is not None  # torch returns None on ranks outside the group
        pending.append(PendingMessages([message], [work], axis, checks))
    return pending


def post(messages: Sequence[Message], axis: Axis) -> PendingMessages:
    """Start to send and receive a batch of messages.

    Args:
        messages: at least one; two ranks that send to each other must do so in one batch.
        axis: ranks that take part; no other operation may use its group meanwhile.
    """
    checks = _announce(messages, axis)
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


def _announce(messages: Sequence[Message], axis: Axis) -> list[Callable[[], None]]:
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
