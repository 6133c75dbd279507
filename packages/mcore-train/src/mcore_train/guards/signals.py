"""Ends a run cleanly: records signals, and polls them between steps and batches.

A signal may reach only some ranks, so all ranks agree on whether to stop by an all-reduce. The
host does not wait for the device: the result is read at the next poll, when the reduction has
completed.
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
"""A second SIGINT within this time is a duplicate, sent to a process and to its group."""


class Stopped(Exception):  # noqa: N818, not an error
    """Raised on all ranks to abandon a validation or text: the run saves and ends."""


class StopRequest:
    """Decides whether a run stops; a context manager that sets signal handlers.

    SIGTERM may arrive several times, since a batch system sends it to a process group and
    launchers forward it. A second SIGINT interrupts the process at once.

    Attributes:
        received: the first received signal, or None.
        is_agreed: whether all ranks have agreed to stop.
    """

    def __init__(
        self,
        ctx: ParallelContext,
        names: Sequence[str] = (),
        has_reason: Callable[[], bool] = lambda: False,
    ) -> None:
        """Store the options; handlers are set in ``__enter__``.

        Args:
            ctx: ``ctx.world`` are the ranks that stop together.
            names: signals other than SIGTERM and SIGINT.
            has_reason: called in each poll; whether this rank has another reason to stop.
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
        """Return whether any rank had a reason to stop at the previous poll.

        All-reduces one number over the world until the result is True; every rank must call
        this equally often.
        """
        if self.is_agreed:
            return True
        must_stop = self.received is not None or self._has_reason()
        if self.ctx.world.size == 1:
            self.is_agreed = must_stop
            return must_stop
        previous, self._answer = self._answer, _Answer(must_stop, self.ctx)
        self.is_agreed = previous is not None and previous.read()
        return self.is_agreed

    def check(self) -> None:
        """Poll within a long operation, and raise an exception to abandon it.

        Raises:
            Stopped: on all ranks, when they have agreed to stop.
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
    """Maximum over all ranks of a flag, copied asynchronously to the host."""

    def __init__(self, must_stop: bool, ctx: ParallelContext) -> None:
        value = torch.full((), float(must_stop), device=ctx.device)
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
