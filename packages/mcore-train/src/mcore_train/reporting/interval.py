"""Averages over the steps between two reports: losses, speed, and the balance of experts."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from statistics import fmean

import torch
from torch import Tensor

from mcore_models.logical_tensors import further_mixers, layer_mixers
from mcore_moe.routing.router_stats import SUMMARY_COLUMNS
from mcore_parallel.collectives import all_reduce
from mcore_parallel.launch.watchdog import Watch
from mcore_train.assembly import Run
from mcore_train.reporting.hardware import peak_flops
from mcore_train.reporting.log import StepReport
from mcore_train.step import StepResult


class Interval:
    """Sums over the steps since the last report; they remain on the device until the next.

    Attributes:
        is_first: whether the steps so far belong to the first report.
        num_reports: reports so far.
    """

    def __init__(self, run: Run, watch: Watch | None = None) -> None:
        """Begin an interval at the run's next step; no communication.

        Args:
            run: run whose steps are averaged.
            watch: watchdog that must not count the time of ``paused`` as step time, if any.
        """
        self.run = run
        self._watch = watch
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
        self._num_steps = 0
        self._num_skipped: int | Tensor = 0
        self._first_sample = self.run.progress.consumed_train_samples
        self._last: StepResult | None = None
        self._lr: float | Tensor = 0.0
        self._sums: Tensor | None = None
        self._skipped_losses: Tensor | None = None
        self._balance: Tensor | None = None
        self._started_s = time.perf_counter()

    def add(self, result: StepResult) -> None:
        """Add one step without waiting for the device."""
        self.is_first = self.num_reports == 0
        self._num_steps += 1
        self._last = result
        losses = torch.stack((*result.losses.values(), result.aux_loss)).double()
        # Losses of a skipped step may be infinite, and were not used for an update.
        is_skipped, lr = result.is_skipped, result.lr
        self._num_skipped = self._num_skipped + is_skipped
        if is_skipped is not False:
            self._skipped_losses = losses
        if isinstance(is_skipped, Tensor):
            losses = torch.where(is_skipped, 0.0, losses)
            lr = torch.where(is_skipped, self._lr, losses.new_full((), lr))
        if is_skipped is not True:
            self._sums = losses if self._sums is None else self._sums + losses
            self._lr = lr
        if result.balance is not None:
            before = self._balance
            self._balance = result.balance if before is None else before + result.balance

    @property
    def is_empty(self) -> bool:
        """Whether no step was added since the last report."""
        return self._num_steps == 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose time is not part of the report; waits for the device first."""
        if self.run.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.run.ctx.device)
        before_s = time.perf_counter()
        try:
            with self._watch.between_steps() if self._watch else nullcontext():
                yield
        finally:
            self._started_s += time.perf_counter() - before_s

    def report(self) -> StepReport:
        """Return averages over the steps and reset; waits for the device, sums over ranks."""
        scaler = self.run.precision.loss_scaler
        run, plan, progress = self.run, self.run.plan, self.run.progress
        assert self._last is not None
        lr, num_skipped = float(self._lr), int(self._num_skipped)
        (loss, *others), aux_loss = self._reduced(num_skipped)
        loss_name, *names = run.loss_names
        grad_norm = self._last.grad_norm.item()
        experts = self._experts()
        elapsed_s = time.perf_counter() - self._started_s
        step_s = elapsed_s / self._num_steps
        samples = progress.consumed_train_samples - self._first_sample
        tokens_per_s = samples * plan.config.batch.seq_length / elapsed_s
        size = progress.batch_size_phases[-1].batch_size
        flops = self._flops * tokens_per_s / plan.world_size
        peak = 0.0
        peak_gib = 0.0
        if run.ctx.device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(run.ctx.device))
            peak_gib = torch.cuda.max_memory_allocated(run.ctx.device) / 2**30
        self.num_reports += 1
        self._restart()
        return StepReport(
            iteration=progress.iteration,
            train_iters=plan.train_iters,
            consumed_train_samples=progress.consumed_train_samples,
            consumed_train_tokens=progress.consumed_train_samples
            * plan.config.batch.seq_length,
            step_ms=1e3 * step_s,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_gpu=tokens_per_s / plan.world_size,
            tflops_per_gpu=flops / 1e12,
            mfu=flops / peak if peak else 0.0,
            lr=lr,
            skipped_steps=num_skipped,
            global_batch_size=size,
            loss=loss,
            loss_name=loss_name,
            aux_loss=aux_loss,
            other_losses=dict(zip(names, others, strict=True)),
            grad_norm=grad_norm,
            peak_gib=peak_gib,
            loss_scale=0.0 if scaler is None else scaler.value,
            expert_imbalance=max(_of_layers(experts, "imbalance"), default=0.0),
            load_balancing_loss=fmean(_of_layers(experts, "load_balancing_loss") or [0.0]),
            z_loss=fmean(_of_layers(experts, "z_loss") or [0.0]),
            experts=experts,
        )

    def _experts(self) -> dict[str, float]:
        """Average router statistics over the steps, by layer; sums over pipeline stages."""
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
            for name, value in zip(SUMMARY_COLUMNS, values, strict=True)
        }

    def _reduced(self, num_skipped: int) -> tuple[list[float], float]:
        """Average losses over the steps and sum them over ranks; return losses and aux loss.

        Tensor ranks compute equal losses, and each a part of the aux loss. Skipped steps are
        left out; if all steps were skipped, the losses of the last one are returned.
        """
        ctx = self.run.ctx
        means = self._skipped_losses
        if self._sums is not None and num_skipped < self._num_steps:
            means = self._sums / (self._num_steps - num_skipped)
        assert means is not None
        sums = all_reduce(all_reduce(means, ctx.dp_cp), ctx.pp)
        aux_loss = all_reduce(sums[-1], ctx.tp)
        return sums[:-1].tolist(), aux_loss.item()


def _of_layers(experts: Mapping[str, float], name: str) -> list[float]:
    """Return one statistic of all layers of experts."""
    return [value for key, value in experts.items() if key.startswith(f"{name}/")]
