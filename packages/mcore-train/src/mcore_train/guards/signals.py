"""Ending a run cleanly: SIGTERM and SIGINT are remembered and polled between steps.

A signal may reach only some ranks, so whether to stop is agreed on by all of them, each
step, without making the host wait for the device: an answer is read one step after its
reduction was started, when it has long been computed.
"""

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import ParallelContext

_HANDLED = (signal.SIGTERM, signal.SIGINT)
REPEATED_S = 1.0
"""Within this time a second SIGINT is the first one, sent to a process and to its group."""


class StopRequest:
    """Whether a signal has stopped this process; a context manager that sets the handlers.

    SIGTERM may come often: a batch system sends it to a process group, and launchers pass it
    on. A second SIGINT, of someone who will not wait, acts as it would have without us.

    Attributes:
        received: the first signal that came, or None.
    """

    def __init__(self, ctx: ParallelContext) -> None:
        """Set no handler yet; ``ctx.world`` are the ranks that stop together."""
        self.ctx = ctx
        self.received: signal.Signals | None = None
        self._interrupted_s: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._answer: _Answer | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._remember) for number in _HANDLED}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def poll(self, *, wish: bool = False) -> bool:
        """Return whether any rank had a reason to stop at the last poll; equal on all ranks.

        All-reduces one number over the world; every rank calls it once a step.

        Args:
            wish: a reason of this rank to stop other than a signal.
        """
        mine = wish or self.received is not None
        if self.ctx.world.size == 1:
            return mine
        previous, self._answer = self._answer, _Answer(mine, self.ctx)
        return previous is not None and previous.read()

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        if number != signal.SIGINT:
            return
        now_s = time.monotonic()
        if self._interrupted_s is None:
            self._interrupted_s = now_s
        elif now_s - self._interrupted_s > REPEATED_S:
            signal.signal(number, self._before[signal.SIGINT])
            signal.raise_signal(number)


class _Answer:
    """A reduced number on its way from the device to the host."""

    def __init__(self, mine: bool, ctx: ParallelContext) -> None:
        value = torch.full((), float(mine), device=ctx.device)
        total = all_reduce(value, ctx.world, "max")
        self.event: torch.cuda.Event | None = None
        self.value = total
        if ctx.device.type == "cuda":
            self.value = torch.empty((), pin_memory=True)
            self.value.copy_(total, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> bool:
        if self.event is not None:
            self.event.synchronize()
        return bool(self.value.item())
