"""Comparison of the ranks' first collectives and messages, before each of them runs.

Ranks that call one collective with different shapes hang, crash or, worst, continue with wrong
numbers. So the ranks of a group compare their first calls through the store. The number of the
call decides, so all ranks of a group compare the same ones; later calls cost one comparison of
integers. The receiver of a message compares its shape with the sent one before it reads it.

torch's ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` does not replace this: seen on 2.11, it lets a sum
meet a maximum, and functional all-gathers fail under it on gloo.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from mcore_parallel.launch.watchdog import call_site

CHECKED_CALLS = 256
"""Calls of each group, and messages of each pair of its ranks, that are compared: forward and
backward of some thirty layers."""


class DisagreementError(RuntimeError):
    """Two ranks make different calls at the same place in their sequence of calls."""


@dataclass(slots=True)
class Agreement:
    """Compares one group's first calls; each rank of the group has its own."""

    store: dist.Store
    """That all ranks share."""
    name: str
    """Of the group, the same on all of its ranks and on no other group."""
    ranks: tuple[int, ...]
    """Global ranks of the group; the first one's calls are the measure."""
    rank: int
    """Place of this rank among them."""
    timeout_s: float
    """How long to wait for the first rank's call."""
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context in which the first rank's call is waited for."""
    num_calls: int = field(default=0)
    """Calls so far."""
    num_messages: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Messages so far, by places of sender and receiver."""

    @classmethod
    def of_group(
        cls,
        group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        rank: int,
        timeout: timedelta,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> "Agreement":
        """Make the agreement of a group on one of its ranks, over the world's store."""
        store = distributed_c10d._get_default_store()
        return cls(store, group.group_name, ranks, rank, timeout.total_seconds(), waiting)

    def check(self, what: str, x: Tensor, *, any_rows: bool = False) -> None:
        """Compare a call that is about to happen with that of the group's first rank.

        Args:
            what: the operation, and all that must be equal apart from the tensor.
            x: what is sent; shape and dtype must be equal.
            any_rows: the first dimension may differ.

        Raises:
            DisagreementError: on the rank that differs from the first; names both call sites.
            RuntimeError: if the first rank does not call within the timeout.
        """
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if number >= CHECKED_CALLS:
            return
        call = f"{what} of {_described(x, any_rows=any_rows)}"
        site = call_site(2)
        key = f"agree/{self.name}/{number}"
        if self.rank == 0:
            self.store.set(key, f"{call}\n{site}")
            return
        first, first_site = self._received(
            key,
            f"rank {self.ranks[self.rank]} calls {call} at {site}; rank {self.ranks[0]} did "
            "not come",
        )
        if first != call:
            raise DisagreementError(
                f"ranks {self.ranks[0]} and {self.ranks[self.rank]} disagree on call {number} "
                f"of their group: {first} at {first_site}, but {call} at {site}"
            )

    def announce_message(self, peer: int, x: Tensor) -> None:
        """Announce the shape and dtype of a message to its receiver."""
        key = self._next_message(self.rank, peer)
        if key:
            self.store.set(key, f"{_described(x)}\n{call_site(2)}")

    def expect_message(self, peer: int, x: Tensor) -> Callable[[], None] | None:
        """Expect a message of a rank.

        Returns:
            What compares it with the one sent, to be called before that is waited for: it
            waits until it is on its way, and raises what ``check`` raises. None: no more
            messages are compared.
        """
        key = self._next_message(peer, self.rank)
        if not key:
            return None
        expected, site = _described(x), call_site(2)
        return partial(self._compare_message, peer, key, expected, site)

    def _compare_message(self, peer: int, key: str, expected: str, site: str) -> None:
        sender, receiver = self.ranks[peer], self.ranks[self.rank]
        sent, sent_at = self._received(
            key, f"rank {receiver} expects {expected} at {site}; rank {sender} sent nothing"
        )
        if sent != expected:
            raise DisagreementError(
                f"ranks {sender} and {receiver} disagree on a message: {sent} is sent at "
                f"{sent_at}, but {expected} is expected at {site}"
            )

    def _received(self, key: str, otherwise: str) -> list[str]:
        """Wait for another rank's call or message; return its description and call site."""
        try:
            with self.waiting():
                self.store.wait([key], timedelta(seconds=self.timeout_s))
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"{otherwise} before the store was gone, and with it the rank that holds it"
            ) from error
        except dist.DistError as error:
            raise RuntimeError(f"{otherwise} within {self.timeout_s:.0f} s") from error
        return self.store.get(key).decode().split("\n")

    def _next_message(self, sender: int, receiver: int) -> str:
        """Return the store's key of the next message of two ranks; empty: not compared."""
        number = self.num_messages[sender, receiver]
        self.num_messages[sender, receiver] += 1
        key = f"agree/{self.name}/{sender}-{receiver}/{number}"
        return key if number < CHECKED_CALLS else ""


def _described(x: Tensor, *, any_rows: bool = False) -> str:
    shape = ["any", *x.shape[1:]] if any_rows else list(x.shape)
    return f"{shape} {str(x.dtype).removeprefix('torch.')}"


def agree(agreement: Agreement | None, what: str, x: Tensor, *, any_rows: bool = False) -> None:
    """Compare a call, outside compiled code, where the group has an agreement.

    Raises:
        DisagreementError: see ``Agreement.check``.
    """
    if agreement is not None and not torch.compiler.is_compiling():
        agreement.check(what, x, any_rows=any_rows)
