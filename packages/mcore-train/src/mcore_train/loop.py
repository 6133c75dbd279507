"""The training loop: batches in, steps, reports, validations, checkpoints, and a clean end."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext

import torch

from mcore_models.protocol import MicroBatch
from mcore_parallel.data_parallel.replica_checks import UnlikeWeightsError
from mcore_parallel.launch.watchdog import Watch
from mcore_train.assembly import Run
from mcore_train.batches.micro_batches import train_batches
from mcore_train.checkpoints.checkpointing import Checkpoints
from mcore_train.diagnosis.memory import MemoryHistory
from mcore_train.evaluation import score_test_data, validate
from mcore_train.guards.deadline import Deadline
from mcore_train.guards.gc_control import GCControl
from mcore_train.guards.nan_guard import FiniteGradients, WeightCopies
from mcore_train.guards.rerun import Rerun
from mcore_train.guards.signals import Stopped, StopRequest
from mcore_train.guards.stragglers import StragglerWatch
from mcore_train.reporting.alarms import find_alarms
from mcore_train.reporting.header import pace_line
from mcore_train.reporting.interval import Interval
from mcore_train.reporting.layer_statistics import LayerStatistics
from mcore_train.reporting.log import Reporter, StepReport
from mcore_train.reporting.profiling import StepProfiler
from mcore_train.reporting.waterfall import StepWatch
from mcore_train.resiliency.sections import Sections
from mcore_train.sample_texts import TextWriter
from mcore_train.step import StepResult, train_step
from mcore_train.updating.lr_schedule import batch_lr_factor, learning_rate, weight_decay
from mcore_train.updating.parameter_groups import named_rates
from mcore_train.zero_shot import ZeroShotTasks

log = logging.getLogger(__name__)

OnReport = Callable[[StepReport], None]


def train(
    run: Run,
    reporter: Reporter,
    *,
    until: int = 0,
    on_report: OnReport | None = None,
    watch: Watch | None = None,
    sections: Sections | None = None,
) -> bool:
    """Train to the end of the plan, or until a signal or a time limit stops the run.

    A step is saved before it is validated or writes texts, so that a kill in either loses no
    step; once the run is to stop, they end between two batches or tokens. Before a save,
    gradients are checked to be finite and replicas of weights to be equal. A run that
    validates and has test data scores them at the end of the plan, after the last save.

    Args:
        run: changed in place; continues after ``run.progress.iteration``.
        reporter: where reports go; entered and left by the caller.
        until: step to end after, before the plan's end; 0: the plan's end.
        on_report: also gets every report, on all ranks.
        watch: is told of each step, so that it finds hangs.
        sections: are told of steps and saves, for the monitors of ft_launcher.

    Returns:
        True if all steps were done, of which --eval-only has none; False if a signal or a time
        limit ended the run before.

    Raises:
        NonFiniteError: on all ranks, if gradients are not finite any more.
        UnlikeWeightsError: on all ranks, if replicas of weights differ.
    """
    config, progress = run.plan.config, run.progress
    last = until or run.plan.train_iters
    watch = watch or Watch(None, run.ctx.world.rank, 1, math.inf)
    sections = sections or Sections()
    stragglers = StragglerWatch(run.ctx, config.watching, reporter)
    batches = stragglers.timed(train_batches(run))
    rerun = (
        Rerun(run, config.watching.spike_factor) if config.watching.rerun_on_mismatch else None
    )
    interval, step_watch, layers = Interval(run, watch), StepWatch(run), LayerStatistics(run)
    gradients = FiniteGradients(is_on=config.run.check_for_nan_in_loss_and_grad)
    replicas = WeightCopies(run.data_parallel, progress.iteration)
    checkpoints = Checkpoints(run, reporter)
    memory = MemoryHistory(run, config.memory)
    deadline = Deadline(config.run)
    stop = StopRequest(
        run.ctx, config.run.exit_signal, lambda: deadline.is_over(checkpoints.longest_save_s)
    )
    collector = GCControl(config.run.manual_gc_interval)
    with ExitStack() as stack:
        profiler = StepProfiler(run)
        graphs = run.recorder or nullcontext()
        for context in (memory, graphs, checkpoints, stop, collector, profiler):
            stack.enter_context(context)
        writer = TextWriter(run) if config.samples.sample_interval else None
        if writer is not None:
            stack.callback(writer.close)

        tasks = ZeroShotTasks(run) if config.evaluation.eval_task_interval else None
        if tasks is not None:
            stack.callback(tasks.close)

        def between_batches() -> None:
            reporter.beat()
            sections.beat()
            checkpoints.poll()
            stop.check()

        options = config.evaluation
        if options.eval_only or (options.eval_at_start and progress.iteration == 0):
            try:
                with interval.paused():
                    validate(run, reporter, between_batches)
                    if options.eval_only:
                        score_test_data(run, reporter, between_batches)
            except Stopped:
                return False
            if options.eval_only:
                return True

        def before_update() -> None:
            checkpoints.hold()
            layers.before_update(progress.iteration + 1)

        while progress.iteration < last:
            step = progress.iteration + 1
            profiler.before(step)
            step_watch.before(step)
            layers.before(step)
            with sections.step(), stragglers.step(step):
                result = one_step(run, batches, before_update, rerun)
            layers.after(step)
            profiler.after(step)
            watch.step_ended()
            is_last = step == last or _divides(config.run.exit_interval, step)

            interval.add(result)
            gradients.add(step, result.grad_norm, result.is_skipped)  # reads the step before
            collector.after_step(step)
            memory.after_step(step)
            with sections.checkpointing():
                checkpoints.poll()
            reporter.advance(step, run.plan.train_iters)
            step_watch.after(step)
            if _divides(config.logging.log_interval, step) or step == last or interval.is_first:
                _report(run, interval, (step_watch, layers), reporter, on_report)

            if _divides(config.run.check_weight_hash_across_dp_replicas_interval, step):
                with interval.paused():
                    _check_replicas(replicas, step, rerun)
            if is_last:
                gradients.check()
            if _divides(config.saving.save_interval, step) or (is_last and config.saving.save):
                with step_watch.saving(), sections.checkpointing(is_save=True):
                    _save(checkpoints, gradients, interval, watch)
            elif _divides(config.local_saving.non_persistent_save_interval, step):
                gradients.check()
                with (
                    interval.paused(),
                    step_watch.saving(),
                    sections.checkpointing(is_save=True),
                ):
                    checkpoints.save_locally()

            try:
                stop.check()
                if _divides(config.evaluation.interval, step):
                    with interval.paused(), sections.validation():
                        validate(run, reporter, between_batches)
                if tasks is not None and _divides(config.evaluation.eval_task_interval, step):
                    with interval.paused():
                        tasks.score(reporter)
                if writer is not None and _divides(config.samples.sample_interval, step):
                    with interval.paused():
                        reporter.report_texts(step, writer.write(between_batches))
            except Stopped:
                is_last = True
            if is_last and step < last:
                log.info("stopping after iteration %d", step)
                break
        stack.enter_context(watch.between_steps())
        gradients.check()
        with sections.checkpointing(is_save=True):
            checkpoints.finish()
        if progress.iteration >= run.plan.train_iters and not stop.is_agreed:
            try:
                score_test_data(run, reporter, stop.check)
            except Stopped:
                log.info("the run was stopped before the test data were scored")
    return progress.iteration >= last


def one_step(
    run: Run,
    batches: Iterator[Sequence[MicroBatch]],
    before_update: Callable[[], None],
    rerun: Rerun | None = None,
) -> StepResult:
    """Train on the next batch, by the schedule's rates for it, and count the step.

    Args:
        run: changed in place: weights, optimizer state and progress.
        batches: this rank's micro-batches of one step after another.
        before_update: called right before weights and optimizer state change.
        rerun: checks the step before its update, and computes it again if it is suspicious.
    """
    schedule, progress = run.plan.schedule, run.progress
    batch_size = run.plan.ramp.size_at(progress.consumed_train_samples)
    options, samples = run.plan.config, progress.schedule_samples
    factor = batch_lr_factor(options.batch, batch_size, run.plan.global_batch_size)
    rates = named_rates(options.parameter_rates, schedule, samples)
    with run.ctx.clock.span("data"):
        batch = next(batches)
    if rerun is not None:
        rerun.begin(batch)
    result = train_step(
        run,
        batch,
        factor * learning_rate(schedule, samples),
        weight_decay(schedule, samples),
        before_update,
        {name: factor * rate for name, rate in rates.items()},
        check=rerun.check if rerun is not None else None,
    )
    progress.count_step(batch_size, is_skipped=result.is_skipped)
    return result


def _report(
    run: Run,
    interval: Interval,
    measured: tuple[StepWatch, LayerStatistics],
    reporter: Reporter,
    on_report: OnReport | None,
) -> None:
    report = interval.report()
    reporter.report(report)
    step_watch, layers = measured
    if layers.has_recorded:
        with interval.paused():
            reporter.record("layers", *layers.report())
    if step_watch.has_recorded:
        with interval.paused():
            waterfall = step_watch.report()
            if reporter.is_active:
                alarms = find_alarms(
                    run.plan, waterfall, report.mfu, _device_name(run.ctx.device)
                )
                reporter.report_waterfall(waterfall, alarms)
    # The first report includes what only the first step takes: the pace follows the second.
    if interval.num_reports == 2 and reporter.with_lines:
        log.info("%s", pace_line(run, report.step_ms))
    if on_report is not None:
        on_report(report)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _check_replicas(replicas: WeightCopies, step: int, rerun: Rerun | None) -> None:
    try:
        replicas.check(step)
    except UnlikeWeightsError as error:
        if rerun is None:
            raise
        rerun.explain(error)


def _save(
    checkpoints: Checkpoints, gradients: FiniteGradients, interval: Interval, watch: Watch
) -> None:
    """Save at once, after a check of the gradients, or in the background.

    A save in the background is part of the step and does not wait for the device; its
    gradients are checked one step later, before it becomes durable.
    """
    if checkpoints.is_async:
        with watch.between_steps():  # it may wait for the save before it
            checkpoints.save()
        return
    with interval.paused():
        gradients.check()
        checkpoints.save()


def _divides(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
