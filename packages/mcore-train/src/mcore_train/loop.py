"""The training loop: next batch, step, report, save, validate, stop."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

from mcore_models.protocol import MicroBatch
from mcore_parallel.data_parallel.replica_checks import UnlikeWeightsError
from mcore_parallel.launch.watchdog import Watch
from mcore_train.assembly import Run
from mcore_train.batches.micro_batches import train_batches
from mcore_train.checkpoints.checkpointing import Checkpoints
from mcore_train.evaluation import Evaluations
from mcore_train.guards.deadline import Deadline
from mcore_train.guards.nan_guard import FiniteGradients, WeightCopies
from mcore_train.guards.rerun import Rerun
from mcore_train.guards.signals import Stopped, StopRequest
from mcore_train.guards.spikes import SpikeError, SpikePolicy
from mcore_train.losses import StepLosses
from mcore_train.observers import OnReport, RunObservers, is_due
from mcore_train.reporting.log import Reporter
from mcore_train.resiliency.sections import Sections
from mcore_train.step import StepResult, backward, update
from mcore_train.updating.lr_schedule import batch_lr_factor, learning_rate, weight_decay
from mcore_train.updating.parameter_groups import named_rates

log = logging.getLogger(__name__)


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

    A step is saved before validation and sample texts, so that a run that is killed there loses
    no step; a request to stop ends validation and texts between two batches or tokens. Before a
    save, gradients are checked to be finite and replicas of weights to be equal. A run that
    validates and has test data scores the test data at the end of the plan, after the last
    save.

    Args:
        run: changed in place; continues after ``run.progress.iteration``.
        reporter: where reports go; entered and left by the caller.
        until: step to end after, before the plan's end; 0: the plan's end.
        on_report: also gets every report, on all ranks.
        watch: finds hangs by the times of steps.
        sections: report steps and saves to the monitors of ft_launcher.

    Returns:
        True if all steps were done (--eval-only has none); False if a signal or a time limit
        ended the run first.

    Raises:
        NonFiniteError: on all ranks, if a gradient is not finite.
        SpikeError: on all ranks, if a spike ends the run; the step is saved.
        UnlikeWeightsError: on all ranks, if replicas of weights differ.
    """
    config, progress = run.plan.config, run.progress
    last = until or run.plan.train_iters
    watch = watch or Watch(None, run.ctx.world.rank, 1, math.inf)
    observers = RunObservers(run, reporter, watch, sections or Sections(), on_report)
    batches = observers.timed(train_batches(run))
    spike_factor = config.watching.spike_factor
    rerun = Rerun(run, spike_factor) if config.watching.rerun_on_mismatch else None
    gradients = FiniteGradients(is_on=config.run.check_for_nan_in_loss_and_grad)
    replicas = WeightCopies(run.data_parallel, progress.iteration)
    checkpoints, deadline = Checkpoints(run, reporter), Deadline(config.run)
    spikes = SpikePolicy(run, reporter, checkpoints, observers.paused)
    stop = StopRequest(
        run.ctx, config.run.exit_signal, lambda: deadline.is_over(checkpoints.longest_save_s)
    )

    def before_update() -> None:
        checkpoints.hold()
        observers.before_update(progress.iteration + 1)

    def between_batches() -> None:
        reporter.beat()
        observers.sections.beat()
        checkpoints.poll()
        stop.check()

    with ExitStack() as stack:
        for context in (observers, run.recorder or nullcontext(), checkpoints, stop):
            stack.enter_context(context)
        evaluations = stack.enter_context(Evaluations(run, observers, between_batches))
        try:
            evaluations.at_start()
        except Stopped:
            return False
        if config.evaluation.eval_only:
            return True

        stack.enter_context(_saving_before_spike(checkpoints))
        while progress.iteration < last:
            step = progress.iteration + 1
            if progress.iteration in config.spikes.iterations_to_skip:
                pass_over(run, batches, spikes)
            else:
                with observers.step(step):
                    result = one_step(run, batches, before_update, rerun, spikes)
                # Reads the norm of the step before, ahead of the poll that makes its save
                # durable.
                gradients.add(step, result.grad_norm, result.is_skipped)
                observers.after_step(step, result, checkpoints.poll)
            is_last = step == last or is_due(config.run.exit_interval, step)

            is_reported = step == last or observers.is_first_report
            is_reported |= is_due(config.logging.log_interval, step)
            if is_reported and observers.has_steps:
                observers.report()
            if is_due(config.run.check_weight_hash_across_dp_replicas_interval, step):
                with observers.paused():
                    _check_replicas(replicas, step, rerun)
            if is_last:
                gradients.check()
            if is_last or _is_saved(run, step):
                spikes.settle()
            _save_if_due(run, step, checkpoints, gradients, observers, is_last=is_last)
            try:
                stop.check()
                evaluations.after_step(step)
            except Stopped:
                is_last = True
            if is_last and step < last:
                log.info("stopping after iteration %d", step)
                break

        stack.enter_context(watch.between_steps())
        spikes.settle()
        gradients.check()
        with observers.sections.checkpointing(is_save=True):
            checkpoints.finish()
        if progress.iteration >= run.plan.train_iters and not stop.is_agreed:
            evaluations.at_end(stop.check)
    return progress.iteration >= last


def one_step(
    run: Run,
    batches: Iterator[Sequence[MicroBatch]],
    before_update: Callable[[], None],
    rerun: Rerun | None = None,
    spikes: SpikePolicy | None = None,
) -> StepResult:
    """Train on the next batch at the schedule's learning rates, and count the step.

    Args:
        run: changed in place: weights, optimizer state and progress.
        batches: this rank's micro-batches of one step after another.
        before_update: called right before weights and optimizer state change.
        rerun: checks the step before its update, and computes it again if it is suspicious.
        spikes: acts on a spike in the step before, once it is known.

    Raises:
        SpikeError: on all ranks, if the step before was a spike that ends the run.
    """
    schedule, progress, clock = run.plan.schedule, run.progress, run.ctx.clock
    batch_size = run.plan.ramp.size_at(progress.consumed_train_samples)
    with clock.span("data"):
        batch = next(batches)

    def compute() -> StepLosses:
        if rerun is not None:
            rerun.begin(batch)
        with clock.span("compute"):
            return backward(run, batch)

    losses = compute()
    # Whether the step before was a spike is known only now, while this backward runs. If the
    # spike rewound the weights, the gradients of this batch are computed again.
    if spikes is not None and spikes.settle():
        losses = compute()
    # The schedule leaves out spikes, so read the sample count after ``settle``.
    options, samples = run.plan.config, progress.schedule_samples
    factor = batch_lr_factor(options.batch, batch_size, run.plan.global_batch_size)
    rates = named_rates(options.parameter_rates, schedule, samples)
    result = update(
        run,
        losses,
        factor * learning_rate(schedule, samples),
        weight_decay(schedule, samples),
        before_update,
        {name: factor * rate for name, rate in rates.items()},
        check=rerun.check if rerun is not None else None,
    )
    progress.count_step(batch_size, is_skipped=result.is_skipped is True)
    if spikes is not None:
        spikes.note(result, batch_size)
    return result


def pass_over(
    run: Run, batches: Iterator[Sequence[MicroBatch]], spikes: SpikePolicy | None = None
) -> None:
    """Read the next batch and count its step; nothing else of the run changes.

    Args:
        run: only its progress is changed.
        batches: this rank's micro-batches of one step after another.
        spikes: records the skipped batch.
    """
    batch_size = run.plan.ramp.size_at(run.progress.consumed_train_samples)
    with run.ctx.clock.span("data"):
        next(batches)
    run.progress.count_step(batch_size, is_skipped=True)
    if spikes is not None:
        spikes.note_given(batch_size)


@contextmanager
def _saving_before_spike(checkpoints: Checkpoints) -> Iterator[None]:
    """Save the current step, whose weights are those before the spike that ends the body."""
    try:
        yield
    except SpikeError:
        checkpoints.finish()
        raise


def _is_saved(run: Run, step: int) -> bool:
    config = run.plan.config
    intervals = (
        config.saving.save_interval,
        config.local_saving.non_persistent_save_interval,
    )
    return any(is_due(interval, step) for interval in intervals)


def _check_replicas(replicas: WeightCopies, step: int, rerun: Rerun | None) -> None:
    try:
        replicas.check(step)
    except UnlikeWeightsError as error:
        if rerun is None:
            raise
        rerun.explain(error)


def _save_if_due(
    run: Run,
    step: int,
    checkpoints: Checkpoints,
    gradients: FiniteGradients,
    observers: RunObservers,
    *,
    is_last: bool,
) -> None:
    """Save to the run folder, or else to the hosts' disks, after a check of the gradients.

    A save in the background does not wait for the device; its gradients are checked one step
    later, before it becomes durable.
    """
    config = run.plan.config
    if is_due(config.saving.save_interval, step) or (is_last and config.saving.save):
        with observers.saving(is_async=checkpoints.is_async):
            if not checkpoints.is_async:
                gradients.check()
            checkpoints.save()
    elif is_due(config.local_saving.non_persistent_save_interval, step):
        gradients.check()
        with observers.saving(is_async=False):
            checkpoints.save_locally()
