"""Calls all observers of a training run: measurements, reports and monitors.

The training loop calls four hooks of ``RunObservers``: ``step`` is the context of a step,
``before_update`` and ``after_step`` are called once in it and after it, ``report`` is called at
the log interval. Further contexts keep saves and validations out of the measured step time.
Nothing here changes weights or decides when a run ends.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self, TypeVar

import torch

from mcore_parallel.launch.watchdog import Watch
from mcore_train.assembly import Run
from mcore_train.diagnosis.memory import MemoryHistory
from mcore_train.guards.gc_control import GCControl
from mcore_train.guards.stragglers import StragglerWatch
from mcore_train.reporting.alarms import find_alarms
from mcore_train.reporting.header import pace_line
from mcore_train.reporting.interval import Interval
from mcore_train.reporting.layer_statistics import LayerStatistics
from mcore_train.reporting.log import Reporter, StepReport
from mcore_train.reporting.profiling import StepProfiler
from mcore_train.reporting.waterfall import StepWatch
from mcore_train.resiliency.sections import Sections
from mcore_train.step import StepResult

log = logging.getLogger(__name__)

OnReport = Callable[[StepReport], None]
Item = TypeVar("Item")


class RunObservers:
    """All observers of one run, a context manager; all ranks call every method together.

    Attributes:
        reporter: where reports go.
        sections: reports steps and saves to the monitors of ft_launcher.
    """

    def __init__(
        self,
        run: Run,
        reporter: Reporter,
        watch: Watch,
        sections: Sections,
        on_report: OnReport | None = None,
    ) -> None:
        """Build the observers that the options name; gathers hosts for ``--log-straggler``.

        Args:
            run: observed from its next step on.
            reporter: entered and left by the caller.
            watch: finds hangs.
            sections: entered and left by the caller.
            on_report: also gets every report, on all ranks.
        """
        config = run.plan.config
        self.reporter, self.sections = reporter, sections
        self._run, self._watch, self._on_report = run, watch, on_report
        self._stragglers = StragglerWatch(run.ctx, config.watching, reporter)
        self._interval, self._step_watch = Interval(run, watch), StepWatch(run)
        self._layers = LayerStatistics(run)
        self._memory = MemoryHistory(run, config.memory)
        self._collector = GCControl(config.run.manual_gc_interval)
        self._profiler = StepProfiler(run)
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        """Begin to record memory, and freeze the garbage collector."""
        # The memory history comes first: it reports an out-of-memory error after all others.
        for context in (self._memory, self._collector, self._profiler):
            self._contexts.enter_context(context)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._contexts.__exit__(kind, error, trace)

    def timed(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yield the same batches, and time the waits for them."""
        return self._stragglers.timed(batches)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A context around step ``step``, from its batch to its update."""
        self._profiler.before(step)
        self._step_watch.before(step)
        self._layers.before(step)
        with self.sections.step(), self._stragglers.step(step):
            yield
        self._layers.after(step)
        self._profiler.after(step)
        self._watch.step_ended()

    def before_update(self, step: int) -> None:
        """Measure gradients and weights right before the update of a step."""
        self._layers.before_update(step)

    def after_step(self, step: int, result: StepResult, poll_saves: Callable[[], None]) -> None:
        """Add the result to the interval, and end the recording of the step.

        Args:
            step: its number.
            result: of the step.
            poll_saves: advances saves in the background; its time is part of the step.
        """
        self._interval.add(result)
        self._collector.after_step(step)
        self._memory.after_step(step)
        with self.sections.checkpointing():
            poll_saves()
        self.reporter.advance(step, self._run.plan.train_iters)
        # The recorded step ends last: collection and polling are its host time.
        self._step_watch.after(step)

    @property
    def is_first_report(self) -> bool:
        """Whether no step of this run was reported yet."""
        return self._interval.is_first

    @property
    def has_steps(self) -> bool:
        """Whether a step was trained since the last report."""
        return not self._interval.is_empty

    def report(self) -> None:
        """Report the steps since the last report, and records of single steps."""
        report = self._interval.report()
        self.reporter.report(report)
        if self._layers.has_recorded:
            with self._interval.paused():
                self.reporter.record("layers", *self._layers.report())
        if self._step_watch.has_recorded:
            with self._interval.paused():
                self._report_waterfall(report.mfu)
        # The first step loads kernels and connects ranks: the pace follows the second report.
        if self._interval.num_reports == 2 and self.reporter.with_lines:
            log.info("%s", pace_line(self._run, report.step_ms))
        if self._on_report is not None:
            self._on_report(report)

    def _report_waterfall(self, mfu: float) -> None:
        waterfall = self._step_watch.report()
        self._stragglers.add_work(waterfall.iteration, waterfall.work_scores)
        if self.reporter.is_active:
            device = self._run.ctx.device
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
            alarms = find_alarms(self._run.plan, waterfall, mfu, name)
            self.reporter.report_waterfall(waterfall, alarms)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the body out of the step time; first waits for the device."""
        with self._interval.paused():
            yield

    @contextmanager
    def validating(self) -> Iterator[None]:
        """A context around a validation, which is not part of a step."""
        with self._interval.paused(), self.sections.validation():
            yield

    @contextmanager
    def saving(self, *, is_async: bool) -> Iterator[None]:
        """A context around a save.

        Args:
            is_async: whether the save is in the background. Its start is part of the step and
                does not wait for the device. It may wait for the save before it, which does not
                count as a hang.
        """
        pause = self._watch.between_steps() if is_async else self._interval.paused()
        with self._step_watch.saving(), self.sections.checkpointing(is_save=True), pause:
            yield


def is_due(interval: int, step: int) -> bool:
    """Whether an interval divides a step; an interval of 0 divides none."""
    return interval > 0 and step % interval == 0
