"""The training loop: batches in, steps, reports, validations, checkpoints, and a clean end."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from mcore_data.tracing.data_plan import Stretch
from mcore_models.protocol import MicroBatch
from mcore_moe.routing.router_stats import SUMMARY
from mcore_parallel.collectives import all_reduce
from mcore_parallel.logical_tensors import further_mixers, layer_mixers
from mcore_train.assembly import Run
from mcore_train.batches import final_batches, train_batches, valid_batches
from mcore_train.checkpoints.checkpointing import Checkpoints
from mcore_train.diagnosis.memory import MemoryHistory
from mcore_train.evaluation import Score, evaluate
from mcore_train.guards.deadline import Deadline
from mcore_train.guards.gc_control import GCControl
from mcore_train.guards.nan_guard import FiniteGradients
from mcore_train.guards.replica_guard import WeightCopies
from mcore_train.guards.signals import Stopped, StopRequest
from mcore_train.lr_schedule import learning_rate, weight_decay
from mcore_train.options.option_conflicts import looking_intervals
from mcore_train.reporting.hardware import peak_flops
from mcore_train.reporting.header import pace_line
from mcore_train.reporting.log import Reporter, StepReport
from mcore_train.sample_texts import TextWriter
from mcore_train.step import StepResult, backward, update

log = logging.getLogger(__name__)

OnReport = Callable[[StepReport], None]


def train(
    run: Run, reporter: Reporter, *, until: int = 0, on_report: OnReport | None = None
) -> bool:
    """Train to the end of the plan, or until a signal or a time limit stops the run.

    A step is saved before it is validated or writes texts, and both are left between two
    batches or tokens once the run is to stop: a kill there loses no step. What guards a save,
    the check of gradients and of copies of weights, comes before it. Where a run validates and
    has test data, it is scored on them at the end of the plan, once its last step is saved.

    Args:
        run: changed in place; continues at ``run.iteration``.
        reporter: where reports go; entered and left by the caller.
        until: step to end after, before the plan's end; 0: the plan's end.
        on_report: also gets every report, on all ranks.

    Returns:
        True if all steps were done, False if a signal or a time limit ended it before.

    Raises:
        NonFiniteError: on all ranks, if gradients are not finite any more.
        UnlikeWeightsError: on all ranks, if copies of weights came apart.
    """
    config = run.plan.config
    last = until or run.plan.train_iters
    batches = train_batches(run)
    interval = Interval(run)
    collector = GCControl(config.run.manual_gc_interval)
    checkpoints = Checkpoints(run, reporter)
    gradients = FiniteGradients(is_on=config.run.check_for_nan_in_loss_and_grad)
    copies = WeightCopies(run.data_parallel, run.iteration)
    recorder = run.recorder or nullcontext()
    memory = MemoryHistory(run, config.memory)
    deadline = Deadline(config.run)
    stop = StopRequest(
        run.ctx,
        config.run.exit_signal,
        lambda: deadline.is_over(checkpoints.longest_save_s),
    )
    with ExitStack() as stack:
        for context in (memory, recorder, checkpoints, stop, collector):
            stack.enter_context(context)
        writer = TextWriter(run) if config.samples.sample_interval else None
        if writer is not None:
            stack.callback(writer.close)

        def between_batches() -> None:
            checkpoints.poll()
            stop.check()

        while run.iteration < last:
            result = one_step(run, batches, checkpoints.hold)
            interval.add(result)
            gradients.add(run.iteration, result.grad_norm, result.is_skipped)
            collector.after_step(run.iteration)
            memory.after_step(run.iteration)
            checkpoints.poll()
            reporter.advance(run.iteration, run.plan.train_iters)
            if _is_due(run, config.logging.log_interval, last) or interval.is_first:
                report = interval.report()
                reporter.report(report)
                # The first report has what only the first step takes in it.
                if interval.num_reports == 2 and reporter.with_lines:
                    log.info("%s", pace_line(run, report.step_ms))
                if on_report is not None:
                    on_report(report)
            if _divides(
                config.run.check_weight_hash_across_dp_replicas_interval, run.iteration
            ):
                with interval.paused():
                    copies.check(run.iteration)
            is_last = run.iteration == last or _divides(config.run.exit_interval, run.iteration)
            if is_last:
                settle(run, gradients)
            if _divides(config.saving.save_interval, run.iteration) or (
                is_last and config.saving.save
            ):
                # In the background it is part of the step: nothing waits for the device.
                with nullcontext() if checkpoints.is_async else interval.paused():
                    if not checkpoints.is_async:
                        gradients.check()
                    checkpoints.save()
            elif _divides(config.local_saving.non_persistent_save_interval, run.iteration):
                gradients.check()
                with interval.paused():
                    checkpoints.save_locally()
            try:
                stop.check()
                for each in _due_work(run, reporter, writer):
                    with interval.paused():
                        each(between_batches)
            except Stopped:
                is_last = True
            if is_last and run.iteration < last:
                log.info("stopping after iteration %d", run.iteration)
                break
        settle(run, gradients)
        checkpoints.finish()
        if run.iteration >= run.plan.train_iters and not stop.is_agreed:
            _test(run, reporter, stop)
    return run.iteration >= last


def _due_work(
    run: Run, reporter: Reporter, writer: TextWriter | None
) -> Iterator[Callable[[Callable[[], None]], object]]:
    """Yield the validation and the texts of this step; each takes ``between_batches``."""
    config = run.plan.config
    if _divides(config.evaluation.interval, run.iteration):
        yield partial(validate, run, reporter)
    if writer is not None and _divides(config.samples.sample_interval, run.iteration):
        yield lambda between: reporter.report_texts(run.iteration, writer.write(between))


def _test(run: Run, reporter: Reporter, stop: StopRequest) -> None:
    """Score the test data, if the run validates and has any; left if the run is to stop."""
    if run.plan.config.evaluation.interval == 0 or run.datasets.test is None:
        return
    try:
        score = evaluate(run, *final_batches(run), between_batches=stop.check)
        _report_score(run, reporter, "test", score)
    except Stopped:
        log.info("the run was stopped before the test data were scored")


def validate(
    run: Run, reporter: Reporter, between_batches: Callable[[], None] = lambda: None
) -> Score:
    """Score the validation data, always the same samples, and report.

    With ``--full-validation`` these are all there are. Several sets
    (``--multiple-validation-sets``) are scored and reported one by one.

    Args:
        run: its weights are not changed.
        reporter: gets the scores.
        between_batches: see ``evaluate``.

    Returns:
        The score over all of them.
    """
    total = Score(0.0, 0)
    for name, dataset in (run.datasets.valid_sets or {"": run.datasets.valid}).items():
        batches, num_batches = valid_batches(run, dataset)
        score = evaluate(run, batches, num_batches, between_batches)
        _report_score(run, reporter, f"valid {name}".strip(), score)
        total = Score(total.loss_sum + score.loss_sum, total.num_tokens + score.num_tokens)
    return total


def _report_score(run: Run, reporter: Reporter, kind: str, score: Score) -> None:
    split, _, name = kind.partition(" ")
    others = "".join(f" {loss} value: {value:.6E} |" for loss, value in score.others.items())
    log.info(
        " %s loss at iteration %d%s | lm loss value: %.6E | lm loss PPL: %.6E |%s",
        "validation" if split == "valid" else split,
        run.iteration,
        f" on {name}" if name else "",
        score.loss,
        score.perplexity,
        others,
    )
    numbers = {"loss": score.loss, "perplexity": score.perplexity, "tokens": score.num_tokens}
    numbers |= {loss.replace(" ", "_"): value for loss, value in score.others.items()}
    reporter.record(kind, run.iteration, numbers)


def one_step(
    run: Run, batches: Iterator[Sequence[MicroBatch]], before_update: Callable[[], None]
) -> StepResult:
    """Train on the next batch, at the place in schedule and data where the run stands.

    Args:
        run: changed in place: weights, optimizer, and how far it has come.
        batches: this rank's micro-batches of one step after another.
        before_update: see ``train_step``.
    """
    schedule = run.plan.schedule
    size = run.plan.ramp.size_at(run.consumed_train_samples)
    if run.post_validation is not None:
        run.post_validation.is_due = _is_quiet(run)
    losses = backward(run, next(batches))
    _uncount_skipped(run)
    if not run.stretches or run.stretches[-1].batch_size != size:
        run.stretches.append(Stretch(run.iteration + 1, run.consumed_train_samples, size))
    result = update(
        run,
        losses,
        learning_rate(schedule, run.schedule_samples),
        weight_decay(schedule, run.schedule_samples),
        before_update,
    )
    run.iteration += 1
    run.consumed_train_samples += size
    if not result.is_skipped:
        run.schedule_samples += size
    return result


def _is_due(run: Run, interval: int, last: int) -> bool:
    return run.iteration % interval == 0 or run.iteration == last


def settle(run: Run, gradients: FiniteGradients | None = None) -> None:
    """Make weights and numbers those of the steps done; waits for all ranks if need be."""
    if run.post_validation is not None:
        run.post_validation.settle()
        _uncount_skipped(run)
    if gradients is not None:
        gradients.check()


def _uncount_skipped(run: Run) -> None:
    """Take the step before out of the schedule, if validation found that it overflowed."""
    if run.post_validation is not None and run.post_validation.take_skipped():
        run.schedule_samples -= run.stretches[-1].batch_size


def _is_quiet(run: Run) -> bool:
    """Whether nothing looks at numbers or weights after the step that comes."""
    step = run.iteration + 1
    is_looked_at = step == run.plan.train_iters or any(
        _divides(interval, step) for interval in looking_intervals(run.plan.config).values()
    )
    return "train" in run.warmed_up and not is_looked_at


def _divides(interval: int, iteration: int) -> bool:
    return interval > 0 and iteration % interval == 0


class Interval:
    """Sums over the steps since the last report, kept on the device until it is due.

    Attributes:
        is_first: whether the steps so far belong to the first report.
        num_reports: reports so far.
    """

    def __init__(self, run: Run) -> None:
        """Begin an interval where the run stands; no communication."""
        self.run = run
        self.is_first = False
        self.num_reports = 0
        self._flops = run.plan.family.flops_per_token(
            run.plan.config.model,
            run.plan.padded_vocab_size,
            run.plan.config.batch.seq_length,
            run.plan.config.experts,
        )
        self._restart()

    def _restart(self) -> None:
        self._num_steps = self._num_skipped = 0
        self._first_sample = self.run.consumed_train_samples
        self._last: StepResult | None = None
        self._lr = 0.0
        self._sums: Tensor | None = None
        self._skipped_losses: Tensor | None = None
        self._balance: Tensor | None = None
        self._started_s = time.perf_counter()

    def add(self, result: StepResult) -> None:
        """Add one step; waits for nothing."""
        self.is_first = self.num_reports == 0
        self._num_steps += 1
        self._close_step()
        self._last = result
        if result.balance is not None:
            before = self._balance
            self._balance = result.balance if before is None else before + result.balance

    def _close_step(self) -> None:
        """Add the last step to the sums: by now it is known whether it was skipped."""
        if (result := self._last) is None:
            return
        losses = torch.stack((*result.losses.values(), result.aux_loss)).double()
        if result.is_skipped:
            # Its losses may be infinite, and no update followed from them.
            self._num_skipped += 1
            self._skipped_losses = losses
        else:
            self._sums = losses if self._sums is None else self._sums + losses
            self._lr = result.lr

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what is done inside out of the time; waits for the steps before it."""
        if self.run.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.run.ctx.device)
        before_s = time.perf_counter()
        try:
            yield
        finally:
            self._started_s += time.perf_counter() - before_s

    def report(self) -> StepReport:
        """Average over the steps, restart; waits for the device and sums over the world."""
        run, plan = self.run, self.run.plan
        settle(run)
        self._close_step()
        assert self._last is not None
        (loss, *others), aux_loss = self._reduced()
        names = list(run.chunks[-1].loss_coefficients)[1:]
        grad_norm = self._last.grad_norm.item()
        lr, num_skipped = self._lr, self._num_skipped
        experts = self._experts()
        elapsed_s = time.perf_counter() - self._started_s
        step_s = elapsed_s / self._num_steps
        samples = run.consumed_train_samples - self._first_sample
        tokens_per_s = samples * plan.config.batch.seq_length / elapsed_s
        size = run.stretches[-1].batch_size
        flops = self._flops * tokens_per_s / plan.world_size
        peak = 0.0
        peak_gib = 0.0
        if run.ctx.device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(run.ctx.device))
            peak_gib = torch.cuda.max_memory_allocated(run.ctx.device) / 2**30
        self.num_reports += 1
        self._restart()
        return StepReport(
            iteration=run.iteration,
            train_iters=plan.train_iters,
            consumed_train_samples=run.consumed_train_samples,
            step_ms=1e3 * step_s,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_gpu=tokens_per_s / plan.world_size,
            tflops_per_gpu=flops / 1e12,
            mfu=flops / peak if peak else 0.0,
            lr=lr,
            skipped_steps=num_skipped,
            global_batch_size=size,
            loss=loss,
            aux_loss=aux_loss,
            other_losses=dict(zip(names, others, strict=True)),
            grad_norm=grad_norm,
            peak_gib=peak_gib,
            loss_scale=0.0 if run.loss_scaler is None else run.loss_scaler.value,
            expert_imbalance=max(_of_layers(experts, "imbalance"), default=0.0),
            load_balancing_loss=fmean(_of_layers(experts, "load_balancing_loss") or [0.0]),
            z_loss=fmean(_of_layers(experts, "z_loss") or [0.0]),
            experts=experts,
        )

    def _experts(self) -> dict[str, float]:
        """Average what routers did over the steps, by layer; stages hold different layers."""
        if self._balance is None:
            return {}
        means = all_reduce(self._balance / self._num_steps, self.run.ctx.pp).tolist()
        config = self.run.plan.config
        mixers = layer_mixers(config.model, config.experts)
        further = further_mixers(config.model, config.experts)
        mixers += (further,) * config.model.mtp_num_layers
        return {
            f"{name}/layer_{layer}": value
            for layer, values in enumerate(means)
            if "moe" in mixers[layer]
            for name, value in zip(SUMMARY, values, strict=True)
        }

    def _reduced(self) -> tuple[list[float], float]:
        """Average over steps, sum over ranks: those of a tensor axis share the loss.

        Skipped steps are left out, unless there are no others: then it is the last one.
        """
        ctx = self.run.ctx
        means = self._skipped_losses
        if self._sums is not None:
            means = self._sums / (self._num_steps - self._num_skipped)
        assert means is not None
        sums = all_reduce(all_reduce(means, ctx.dp_cp), ctx.pp)
        aux_loss = all_reduce(sums[-1], ctx.tp)
        return sums[:-1].tolist(), aux_loss.item()


def _of_layers(experts: Mapping[str, float], name: str) -> list[float]:
    """Pick one of the numbers of all layers of experts."""
    return [value for key, value in experts.items() if key.startswith(f"{name}/")]
