"""Validation, test data, sample texts and zero-shot tasks of a run, and when each is due.

A reported loss is the sum of token losses over the number of tokens, never a mean of means.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from mcore_models.protocol import LM_LOSS, MicroBatch, TrainableModel
from mcore_parallel.collectives import all_reduce
from mcore_parallel.pipeline_parallel.runner import Payload
from mcore_train.assembly import Run
from mcore_train.batches.micro_batches import final_batches, place_for, valid_batches
from mcore_train.guards.signals import Stopped
from mcore_train.observers import RunObservers, is_due
from mcore_train.reporting.log import Reporter

if TYPE_CHECKING:
    from mcore_train.sample_texts import TextWriter
    from mcore_train.zero_shot import ZeroShotTasks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvalScore:
    """Loss of a model on a text: sums over tokens."""

    loss_sum: float
    """Nats over all tokens."""
    num_tokens: int
    """Tokens that were predicted."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Means of the model's other losses, by name."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.loss_sum / max(1, self.num_tokens)

    @property
    def perplexity(self) -> float:
        """Per token; capped at e**20, as Megatron does, so that it prints."""
        return math.exp(min(20.0, self.loss))

    def bits_per_byte(self, num_bytes: int) -> float:
        """Return the loss in bits for each byte of the text."""
        return self.loss_sum / math.log(2) / num_bytes


class Evaluations:
    """All evaluations of one run, a context manager; all ranks call every method together.

    The time of evaluations is not part of the step time.
    """

    def __init__(
        self, run: Run, observers: RunObservers, between_batches: Callable[[], None]
    ) -> None:
        """Store the run; ``__enter__`` builds the serving layouts.

        Args:
            run: its weights are not changed.
            observers: of the run; their reporter gets the scores.
            between_batches: called between two batches or tokens; what it raises, on all ranks
                or none, ends the evaluation.
        """
        self._run, self._observers, self._between_batches = run, observers, between_batches
        self._reporter = observers.reporter
        options = run.plan.config.evaluation
        averaged = run.optimizer.averaged
        self._weights = averaged if options.eval_average_weights else nullcontext
        self._writer: TextWriter | None = None
        self._tasks: ZeroShotTasks | None = None
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        """Build the serving layouts of sample texts and zero-shot tasks, if they are asked for.

        Raises:
            ValueError: if a prompt or a task's file cannot be used.
            FileNotFoundError: if a task has no file.
        """
        config = self._run.plan.config
        with ExitStack() as contexts:
            # mcore_infer and its engine are imported only for runs that use them.
            if config.samples.sample_interval:
                from mcore_train.sample_texts import TextWriter

                self._writer = TextWriter(self._run)
                contexts.callback(self._writer.close)
            if config.evaluation.eval_task_interval:
                from mcore_train.zero_shot import ZeroShotTasks

                self._tasks = ZeroShotTasks(self._run)
                contexts.callback(self._tasks.close)
            self._contexts = contexts.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._contexts.close()

    def at_start(self) -> None:
        """Validate before the first step; with --eval-only score the test data too."""
        options, run = self._run.plan.config.evaluation, self._run
        is_first = options.eval_at_start and run.progress.iteration == 0
        if not (options.eval_only or is_first):
            return
        with self._observers.paused(), self._weights():
            validate(run, self._reporter, self._between_batches)
            if options.eval_only:
                score_test_data(run, self._reporter, self._between_batches)

    def after_step(self, step: int) -> None:
        """Validate, score tasks and write texts, each if its interval divides the step."""
        config, run = self._run.plan.config, self._run
        if is_due(config.evaluation.interval, step):
            with self._observers.validating(), self._weights():
                validate(run, self._reporter, self._between_batches)
        if self._tasks is not None and is_due(config.evaluation.eval_task_interval, step):
            with self._observers.paused(), self._weights():
                self._tasks.score(self._reporter)
        if self._writer is not None and is_due(config.samples.sample_interval, step):
            with self._observers.paused(), self._weights():
                texts = self._writer.write(self._between_batches)
                self._reporter.report_texts(step, texts)

    def at_end(self, between_batches: Callable[[], None]) -> None:
        """Score the test data after the last save, unless the run is stopped meanwhile."""
        try:
            with self._weights():
                score_test_data(self._run, self._reporter, between_batches)
        except Stopped:
            log.info("the run was stopped before the test data were scored")


def validate(
    run: Run, reporter: Reporter, between_batches: Callable[[], None] = lambda: None
) -> EvalScore:
    """Score the validation data, always the same samples, and report.

    With ``--full-validation`` these are all samples. Several sets
    (``--multiple-validation-sets``) are scored and reported one by one.

    Args:
        run: its weights are not changed.
        reporter: gets the scores.
        between_batches: see ``evaluate``.

    Returns:
        The score over all sets.
    """
    total = EvalScore(0.0, 0)
    for name, dataset in (run.datasets.valid_sets or {"": run.datasets.valid}).items():
        batches, num_batches = valid_batches(run, dataset)
        score = evaluate(run, batches, num_batches, between_batches)
        _report_score(run, reporter, "valid", score, name)
        total = EvalScore(total.loss_sum + score.loss_sum, total.num_tokens + score.num_tokens)
    return total


def score_test_data(run: Run, reporter: Reporter, between_batches: Callable[[], None]) -> None:
    """Score the test data and report, if the run validates and has test data."""
    if run.plan.config.evaluation.interval and run.datasets.test is not None:
        score = evaluate(run, *final_batches(run), between_batches)
        _report_score(run, reporter, "test", score)


def _report_score(
    run: Run, reporter: Reporter, split: str, score: EvalScore, name: str = ""
) -> None:
    others = "".join(f" {loss} value: {value:.6E} |" for loss, value in score.others.items())
    step, loss_name = run.progress.iteration, run.loss_names[0]
    numbers = {"loss": score.loss, "tokens": score.num_tokens}
    perplexity = ""
    if loss_name == LM_LOSS:
        numbers["perplexity"] = score.perplexity
        perplexity = f" {LM_LOSS} PPL: {score.perplexity:.6E} |"
    log.info(
        " %s loss at iteration %d%s | %s value: %.6E |%s%s",
        "validation" if split == "valid" else split,
        step,
        f" on {name}" if name else "",
        loss_name,
        score.loss,
        perplexity,
        others,
    )
    numbers |= {loss.replace(" ", "_"): value for loss, value in score.others.items()}
    reporter.record(f"{split} {name}".strip(), step, numbers)


def evaluate(
    run: Run,
    batches: Iterable[Mapping[str, Tensor]],
    num_batches: int,
    between_batches: Callable[[], None] = lambda: None,
) -> EvalScore:
    """Score the model on micro-batches of this data rank; all ranks call it together.

    Args:
        run: its weights are not changed.
        batches: micro-batches of this data rank.
        num_batches: how many to take, at most as many as ``batches`` has; equal on all ranks.
        between_batches: called after each of this rank's steps through the pipeline; what it
            raises, on all ranks or none, ends the evaluation.
    """
    iterator = iter(batches)
    names = run.loss_names
    totals = torch.zeros(len(names), 2, dtype=torch.float64, device=run.ctx.device)
    for chunk in run.chunks:
        chunk.eval()
    try:
        with torch.no_grad(), run.keeping_casts():
            for begin in range(0, num_batches, run.plan.num_microbatches):
                group = [
                    place_for(run, next(iterator))
                    for _ in range(begin, min(begin + run.plan.num_microbatches, num_batches))
                ]
                _add_scores(run, run.annotate(group), totals)
                between_batches()
    finally:
        for chunk in run.chunks:
            chunk.train()
    totals = all_reduce(all_reduce(totals, run.ctx.dp_cp), run.ctx.pp)
    (loss_sum, num_tokens), *others = totals.tolist()
    return EvalScore(
        loss_sum,
        int(num_tokens),
        {name: total / max(1.0, n) for name, (total, n) in zip(names[1:], others, strict=True)},
    )


def _add_scores(run: Run, batches: Sequence[MicroBatch], totals: Tensor) -> None:
    """Add losses and token counts of micro-batches to ``totals``, on the last stage only."""
    objective = run.objective

    def add(_model: TrainableModel, output: Payload, microbatch: int) -> None:
        batch = batches[microbatch]
        masks = objective.masks(batch)
        losses = objective.unreduced_losses(output, batch)
        for total, name in zip(totals, objective.coefficients, strict=True):
            total[0] += (losses[name] * masks[name]).sum(dtype=torch.float64)
            total[1] += masks[name].sum(dtype=torch.float64)

    run.pipeline.forward(batches, add)
