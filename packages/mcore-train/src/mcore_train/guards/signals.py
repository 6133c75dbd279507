"""Ends a run cleanly: records signals, and polls them between steps and batches.

A signal may reach only some ranks, so whether to stop is agreed on by all of them without
making the host wait for the device: an answer is read at the poll after the one that started
its reduction, when it has long been computed.
"""

import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import ParallelContext

_ALWAYS = (signal.SIGTERM, signal.SIGINT)
REPEATED_S = 1.0
"""Within this time a second SIGINT is the first one, sent to a process and to its group."""


class Stopped(Exception):  # noqa: N818, it is no error
    """Raised on all ranks to abandon a validation or text: the run saves and ends."""


class StopRequest:
    """Decides whether a run stops; a context manager that sets handlers of signals.

    SIGTERM may come often: a batch system sends it to a process group, and launchers pass it
    on. A second SIGINT has the effect that it has without this class: it interrupts at once.

    Attributes:
        received: the first signal that came, or None.
        is_agreed: whether all ranks have agreed to stop.
    """

    def __init__(
        self,
        ctx: ParallelContext,
        names: Sequence[str] = (),
        has_reason: Callable[[], bool] = lambda: False,
    ) -> None:
        """Set no handler yet.

        Args:
            ctx: ``ctx.world`` are the ranks that stop together.
            names: signals besides SIGTERM and SIGINT.
            has_reason: called in each poll; whether this rank has a reason to stop other than
                a signal.
        """
        self.ctx = ctx
        self._has_reason = has_reason
        self._handled = dict.fromkeys([*_ALWAYS, *(signal.Signals[name] for name in names)])
        self.is_agreed = False
        self.received: signal.Signals | None = None
        self._interrupted_s: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._answer: _Answer | None = None

    def __enter__(self) -> Self:
        self._before = {n: signal.signal(n, self._remember) for n in self._handled}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def poll(self) -> bool:
        """Return whether any rank had a reason to stop at the last poll; equal on all ranks.

        All-reduces one number over the world, until the answer is yes; every rank calls it
        equally often.
        """
        if self.is_agreed:
            return True
        mine = self.received is not None or self._has_reason()
        if self.ctx.world.size == 1:
            self.is_agreed = mine
            return mine
        previous, self._answer = self._answer, _Answer(mine, self.ctx)
        self.is_agreed = previous is not None and previous.read()
        return self.is_agreed

    def check(self) -> None:
        """Poll between two parts of a long operation, and raise to abandon it.

        Raises:
            Stopped: on all ranks, once they have agreed to stop.
        """
        if self.poll():
            raise Stopped

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
