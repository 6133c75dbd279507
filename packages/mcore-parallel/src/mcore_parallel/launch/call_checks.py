"""Compares the ranks' first collectives and messages before they run.

Ranks that call one collective with different shapes hang, crash or, worst, continue with wrong
numbers. So the ranks of a group compare their first ``CHECKED_CALLS`` calls through the store;
later calls cost one comparison of integers. The receiver of a message compares the sent shape
with the expected one before it uses the message.

torch's ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` does not replace this module: on torch 2.11 it
accepts a sum on one rank and a maximum on another, and functional all-gathers fail under it on
gloo.
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
"""Number of compared calls per group, and of compared messages per pair of ranks: forward and
backward of about thirty layers."""


class DisagreementError(RuntimeError):
    """Two ranks of a group differ in the n-th call or message."""


@dataclass(slots=True)
class Agreement:
    """Compares this rank's first calls with those of the group's first rank."""

    store: dist.Store
    """Store that all ranks share."""
    name: str
    """Unique name of the group, equal on all its ranks."""
    ranks: tuple[int, ...]
    """Global ranks of the group; the calls of the first rank are the reference."""
    rank: int
    """Index of this rank in ``ranks``."""
    timeout_s: float
    """Longest wait for the first rank's call, in seconds."""
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context in which the first rank's call is waited for."""
    num_calls: int = field(default=0)
    """Calls so far."""
    num_messages: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Messages so far, by indices of sender and receiver."""

    @classmethod
    def of_group(
        cls,
        group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        rank: int,
        timeout: timedelta,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> "Agreement":
        """Build the agreement of a group on one rank, over the world's store."""
        store = distributed_c10d._get_default_store()
        return cls(store, group.group_name, ranks, rank, timeout.total_seconds(), waiting)

    def check(self, what: str, x: Tensor, *, any_rows: bool = False) -> None:
        """Compare the next call with the same call of the group's first rank.

        Args:
            what: name of the operation with its options, which must be equal.
            x: tensor of the call, whose shape and dtype must be equal.
            any_rows: whether the first dimension may differ.

        Raises:
            DisagreementError: on a rank that differs from the first rank; names both call
                sites.
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
        """Write the shape and dtype of a message to the store, for its receiver."""
        key = self._next_message(self.rank, peer)
        if key:
            self.store.set(key, f"{_described(x)}\n{call_site(2)}")

    def expect_message(self, peer: int, x: Tensor) -> Callable[[], None] | None:
        """Return a function that compares the next message of a rank with the expected one.

        Call the function before waiting for the message: it waits for the announcement and
        raises as ``check`` does. None: enough messages have been compared.
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
        """Wait for another rank's store entry; return its description and call site."""
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
        """Count a message of two ranks; return its key in the store, '' if not compared."""
        number = self.num_messages[sender, receiver]
        self.num_messages[sender, receiver] += 1
        key = f"agree/{self.name}/{sender}-{receiver}/{number}"
        return key if number < CHECKED_CALLS else ""


def _described(x: Tensor, *, any_rows: bool = False) -> str:
    shape = ["any", *x.shape[1:]] if any_rows else list(x.shape)
    return f"{shape} {str(x.dtype).removeprefix('torch.')}"


def agree(agreement: Agreement | None, what: str, x: Tensor, *, any_rows: bool = False) -> None:
    """Run ``Agreement.check``, unless there is no agreement or the code is compiled.

    Raises:
        DisagreementError: if the call differs from the first rank's.
    """
    if agreement is not None and not torch.compiler.is_compiling():
        agreement.check(what, x, any_rows=any_rows)
