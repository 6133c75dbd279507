"""Handles spikes of the loss: records them in the ledger; continues, rewinds or ends the run.

The device has skipped the update (``RecentSteps``). The host reads the judgement of a step
before the next update, while the device computes gradients, and removes the step from the
counts of optimizer and schedule. So a run that skips spikes has the same weights as a run that
leaves out the same batches by ``--iterations-to-skip``.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_ckpt.storage.paths import complete_steps, step_folder
from mcore_train.assembly import Run
from mcore_train.checkpoints.checkpointing import Checkpoints
from mcore_train.checkpoints.resuming import rewind
from mcore_train.guards.nan_guard import HostCopy
from mcore_train.reporting.log import Reporter
from mcore_train.step import StepResult

log = logging.getLogger(__name__)


class SpikeError(FloatingPointError):
    """A spike ended the run; the weights are those before the spike."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step with the judgement that is copied to the host."""

    iteration: int
    first_sample: int
    batch_size: int
    numbers: HostCopy
    """Rows of ``Judgement.numbers``, flat, and 1 for a spike."""


class SpikePolicy:
    """Handles the spikes of a run; every method is collective.

    Attributes:
        is_on: whether steps are judged.
    """

    def __init__(
        self,
        run: Run,
        reporter: Reporter,
        checkpoints: Checkpoints,
        paused: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Store run and options.

        Args:
            run: the run, which is changed in place.
            reporter: writes the lines of the ledger.
            checkpoints: checkpoints of the run; a rewind waits for background saves.
            paused: context whose time is not counted as step time.
        """
        self._run, self._reporter = run, reporter
        self._checkpoints, self._paused = checkpoints, paused
        self._options = run.plan.config.spikes
        self.is_on = self._options.spike_policy != "none"
        self._unread: _Step | None = None

    def note(self, result: StepResult, batch_size: int) -> None:
        """Start the copy of the judgement of the last counted step to the host.

        Args:
            result: result of the step.
            batch_size: sequences of the step.
        """
        if not self.is_on or result.judgement is None:
            return
        judgement, progress = result.judgement, self._run.progress
        is_spike = judgement.is_spike.double()[None]
        self._unread = _Step(
            progress.iteration,
            progress.consumed_train_samples - batch_size,
            batch_size,
            HostCopy(torch.cat([judgement.numbers.flatten(), is_spike])),
        )

    def note_given(self, batch_size: int) -> None:
        """Record the last counted step as left out by ``--iterations-to-skip``."""
        progress = self._run.progress
        log.info("step %d is left out by --iterations-to-skip", progress.iteration)
        first = progress.consumed_train_samples - batch_size
        row = {"action": "given", "first_sample": first, "batch_size": batch_size}
        self._reporter.report_spike(progress.iteration, row)

    def settle(self) -> bool:
        """Handle the last step of ``note`` if it was a spike; once for each step.

        Returns:
            Whether the weights were rewound, so that gradients must be computed again.

        Raises:
            SpikeError: on all ranks, if the run must end.
        """
        step, self._unread = self._unread, None
        if step is None:
            return False
        *numbers, is_spike = step.numbers.read().tolist()
        if not is_spike:
            return False
        run, options = self._run, self._options
        run.optimizer.num_steps -= 1
        run.progress.schedule_samples -= step.batch_size
        first = step.iteration - options.spike_window
        run.progress.spikes = [s for s in run.progress.spikes if s > first] + [step.iteration]
        names = ("loss", "grad_norm")
        row: dict[str, Any] = {"action": options.spike_policy}
        for name, (value, mean, deviation) in zip(
            names, (numbers[:3], numbers[3:]), strict=True
        ):
            row |= {name: value, f"{name}_mean": mean, f"{name}_deviation": deviation}
        row |= {"first_sample": step.first_sample, "batch_size": step.batch_size}
        message = (
            f"iteration {step.iteration} is a spike: loss {numbers[0]:.4g} (before "
            f"{numbers[1]:.4g} +- {numbers[2]:.2g}), gradient norm {numbers[3]:.4g} (before "
            f"{numbers[4]:.4g} +- {numbers[5]:.2g}). Its update was left out."
        )
        is_often = len(run.progress.spikes) >= options.spike_limit
        if options.spike_policy == "stop" or is_often:
            self._reporter.report_spike(step.iteration, {**row, "action": "stop"})
            raise SpikeError(f"{message} {self._advice(step.iteration)}")
        if options.spike_policy == "rewind":
            row["rewound_to"] = self._rewind(step.iteration, message)
            message += f" Weights and optimizer are those of step {row['rewound_to']}."
        log.warning("%s %s", message, self._pointer(step.iteration))
        self._reporter.report_spike(step.iteration, row)
        return options.spike_policy == "rewind"

    def _rewind(self, step: int, message: str) -> int:
        """Load the newest checkpoint that is old enough, or the oldest; return its step."""
        run, folder = self._run, self._run.plan.config.saving.save
        with self._paused():
            self._checkpoints.wait()
            known = complete_steps(folder) if run.ctx.global_rank == 0 else []
            earlier = [s for s in gather_json(known, run.ctx.world)[0] if s < step]
            if not earlier:
                raise SpikeError(
                    f"{message} {folder} has no checkpoint of an earlier step to rewind to: "
                    "give a lower --save-interval, or --spike-policy skip."
                )
            last = step - self._options.spike_rewind_steps
            target = max((s for s in earlier if s <= last), default=min(earlier))
            rewind(run, step_folder(folder, target))
        return target

    def _advice(self, step: int) -> str:
        count, window = len(self._run.progress.spikes), self._options.spike_window
        if self._options.spike_policy != "stop":
            return (
                f"It is spike {count} within {window} steps (--spike-limit), so single "
                "documents are not the cause: continue from an earlier step (--ckpt-step) with "
                f"a lower --lr, or look at the data. {self._pointer(step)}"
            )
        return (
            f"{self._pointer(step)} Repeat the command with --auto-resume to continue with the "
            "next batch, or use --spike-policy skip or rewind, which do not end the run."
        )

    def _pointer(self, step: int) -> str:
        folder = self._run.plan.config.saving.save
        return f"Its documents: mcore-train explain {folder} --step {step}." if folder else ""
