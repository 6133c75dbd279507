"""One training step: forward and backward of all micro-batches, clip, update.

``train_step`` is ``backward`` (all micro-batches through the pipeline, then gradient sums),
then ``update`` (norm, clip, optimizer). Nothing here waits for the device, except under fp16,
whose loss scale depends on the norm: results stay tensors until the caller reads them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mcore_models.protocol import MicroBatch
from mcore_models.qk_clip.row_factors import row_factors
from mcore_moe.routing.router_stats import SUMMARY_COLUMNS, RouterStats, finish_step, summarize
from mcore_parallel.collectives import all_reduce
from mcore_parallel.data_parallel.distributed_optimizer import NO_RATES
from mcore_parallel.data_parallel.grads import clip_coefficient
from mcore_parallel.pipeline_parallel.runner import Payload, StageFunction, StageOutput
from mcore_train.assembly import Run
from mcore_train.losses import StepLosses, count_valid, loss_weights
from mcore_train.pipeline import ChunkSync
from mcore_train.updating.recent_steps import Judgement

StepCheck = Callable[[StepLosses, Tensor], tuple[StepLosses, Tensor]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Numbers of one step, on the device."""

    losses: Mapping[str, Float[Tensor, ""]]
    """This rank's parts of the mean losses by name, the main loss first: summed over ``dp_cp``
    and ``pp`` they are the means."""
    aux_loss: Float[Tensor, ""]
    """This rank's part of the auxiliary losses of experts; the sum over the world is the
    loss."""
    grad_norm: Float[Tensor, ""]
    """Norm of all gradients before clipping; equal on all ranks."""
    lr: float
    """Learning rate of the update; not applied where the step is skipped."""
    balance: Float[Tensor, "L n"] | None = None
    """Router statistics of this rank's layers, with the columns of mcore-moe's
    ``SUMMARY_COLUMNS``; 0 for layers of other stages and layers without experts."""
    is_skipped: bool | Bool[Tensor, ""] = False
    """Whether the update was skipped: a bool if scaled gradients overflowed, which the host has
    read; a tensor on the device if the step may be a spike."""
    judgement: Judgement | None = None
    """Comparison with recent steps; None if the run does not look for spikes."""

    @property
    def loss(self) -> Float[Tensor, ""]:
        """The main loss."""
        return next(iter(self.losses.values()))


def train_step(
    run: Run,
    batches: Sequence[MicroBatch],
    lr: float,
    weight_decay: float,
    before_update: Callable[[], None] | None = None,
) -> StepResult:
    """Train on one global batch; every rank calls it with its own part.

    Args:
        run: changed in place: weights, optimizer state, gradients.
        batches: this rank's micro-batches of the step.
        lr: learning rate.
        weight_decay: decoupled decay.
        before_update: called right before weights and optimizer state change.
    """
    with run.ctx.clock.span("compute"):
        losses = backward(run, batches)
    return update(run, losses, lr, weight_decay, before_update)


def update(
    run: Run,
    losses: StepLosses,
    lr: float,
    weight_decay: float,
    before_update: Callable[[], None] | None = None,
    named_lrs: Mapping[str, float] = NO_RATES,
    check: StepCheck | None = None,
) -> StepResult:
    """Clip the gradients of ``backward`` and update the weights; see ``train_step``.

    A step that overflowed or is a spike changes neither weights nor optimizer.

    Args:
        run: changed in place.
        losses: of this rank's micro-batches.
        lr: learning rate.
        weight_decay: decoupled decay.
        before_update: as in ``train_step``.
        named_lrs: learning rates of parameter groups with a rate of their own, see
            ``named_rates``.
        check: called with losses and gradient norm before the update; returns the losses and
            the norm to use, and may recompute the gradients (``Rerun.check``).
    """
    with run.ctx.clock.span("optimizer"):
        return _update(run, losses, lr, weight_decay, before_update, named_lrs, check)


def _update(
    run: Run,
    losses: StepLosses,
    lr: float,
    weight_decay: float,
    before_update: Callable[[], None] | None,
    named_lrs: Mapping[str, float],
    check: StepCheck | None,
) -> StepResult:
    row_scales = _qk_clip_scales(run)
    # Clipping changes no gradient: the update multiplies gradients by ``scale``.
    norm = run.optimizer.grad_norm()
    if check is not None:
        losses, norm = check(losses, norm)
    unscale, is_skipped = 1.0, False
    if scaler := run.precision.loss_scaler:
        unscale = 1.0 / scaler.value  # before ``update``, which sets the next step's scale
        # The norm is summed over the world, so that all ranks skip a step or none.
        is_finite = bool(norm.isfinite())
        is_skipped = scaler.update(is_finite=is_finite) and not is_finite
        norm = norm * unscale
    # Overflow is known on the host, and the update is not launched. A spike is known on the
    # device alone, so the update is launched with a mask.
    judgement, is_applied = None, None
    if run.recent is not None and not is_skipped:
        judgement = run.recent.judge(_mean_loss(run, losses), norm)
        if run.plan.config.spikes.spike_policy != "none":
            is_applied = ~judgement.is_spike
    if not is_skipped:
        max_norm = run.plan.config.optimizer.clip_grad
        clip = clip_coefficient(norm, max_norm) if max_norm else 1.0
        if before_update is not None:
            before_update()
        if run.precision.fp8_scales is not None:
            run.precision.fp8_scales.move_on(is_applied)
        scale = clip * unscale
        run.optimizer.step(lr, weight_decay, scale, row_scales, named_lrs, is_applied)
    has_experts = run.plan.config.experts.num_experts > 0
    return StepResult(
        losses=losses.named,
        aux_loss=losses.aux_loss,
        grad_norm=norm,
        lr=lr,
        balance=_finish_routers(run, is_applied) if has_experts else None,
        is_skipped=is_skipped if is_applied is None else ~is_applied,
        judgement=judgement,
    )


def _mean_loss(run: Run, losses: StepLosses) -> Float[Tensor, ""]:
    """Return the main loss over the whole batch, with equal bits on all ranks."""
    main = next(iter(losses.named.values()))
    # All tensor ranks have the same loss: divided by tp, the sum over the world counts it once.
    return all_reduce(main / run.ctx.tp.size, run.ctx.world)


def backward(run: Run, batches: Sequence[MicroBatch]) -> StepLosses:
    """Compute the gradients of one global batch, summed over all ranks and not clipped.

    With ``--cuda-graph-impl full_iteration``, replays a CUDA graph after the warm-up steps.
    """
    compute = partial(synced_backward, run)
    return compute(batches) if run.recorder is None else run.recorder(compute, batches)


def synced_backward(run: Run, batches: Sequence[MicroBatch]) -> StepLosses:
    """Compute the summed gradients of one global batch, always without a CUDA graph."""
    losses = _backward(run, batches, run.data_parallel)
    run.data_parallel.finish()
    if run.noise is not None:
        run.noise.end()
    return losses


def backward_of_rank(run: Run, batches: Sequence[MicroBatch]) -> StepLosses:
    """Compute gradients of this model replica's micro-batches, not summed over data ranks.

    The gradients stay in the engine's buffers, for a comparison: call ``zero_grad`` next.
    """
    return _backward(run, batches, _Unsynced())


class _Unsynced:
    """A ``ChunkSync`` that starts no sums over data ranks."""

    def start_sync(self, chunk: int) -> None: ...

    def start_weight_sync(self, chunk: int) -> None: ...


def _backward(run: Run, batches: Sequence[MicroBatch], sync: ChunkSync) -> StepLosses:
    run.data_parallel.zero_grad()
    last = run.chunks[-1]
    losses = StepLosses(run.ctx.device, run.loss_names)
    # count_valid all-reduces over dp and cp. These ranks hold the same stage, so either all of
    # them call it or none.
    num_valid = {}
    if last.stage.has_loss:
        num_valid = count_valid([run.objective.masks(each) for each in batches], run.ctx)
    stages = stage_functions(run, batches, num_valid, losses)
    scales = run.precision.fp8_scales
    amax_recording = nullcontext() if scales is None else scales.noting()
    is_measured = run.noise is not None and run.ctx.clock.is_recording
    after_first = run.noise.start(len(batches)) if run.noise and is_measured else None
    # no_sync: micro-batches only accumulate. ``Pipeline.train`` calls ``sync.start_sync``
    # before a chunk's last backward, in which its buckets are reduced.
    with run.data_parallel.no_sync(), run.keeping_casts(), amax_recording:
        run.pipeline.train(stages, batches, sync, after_first)
    return losses


def stage_functions(
    run: Run,
    batches: Sequence[MicroBatch],
    num_valid: Mapping[str, Float[Tensor, ""]],
    losses: StepLosses,
) -> Mapping[int, StageFunction]:
    """Build the forward of each model chunk of this rank, by chunk number.

    Each adds the losses of its micro-batch to ``losses``.
    """
    # The main loss is divided by the valid tokens of the step (``loss_weights``). Auxiliary
    # losses are one mean for each micro-batch: divide by the micro-batches of the step.
    aux_weight = 1.0 / (len(batches) * run.ctx.dp.size)
    has_aux = run.plan.config.experts.num_experts > 0
    scaler, objective = run.precision.loss_scaler, run.objective
    coefficients = objective.coefficients

    def build(number: int) -> StageFunction:
        model = run.chunks[number]

        def forward(x: Payload | None, microbatch: int) -> StageOutput:
            batch = batches[microbatch]
            output, aux = model.run_stage(batch, x)
            extra = aux * aux_weight if has_aux else None
            if extra is not None:
                losses.aux_loss += extra.detach()
                extra = extra if scaler is None else extra * scaler.scale
            if not model.stage.has_loss:
                return StageOutput(output, extra)
            masks = objective.masks(batch)
            weights = loss_weights(masks, coefficients, num_valid, run.dtype)
            if scaler is not None:  # scale the weights: the loss itself is a root of backward
                weights = {name: each * scaler.scale for name, each in weights.items()}
            scaled_losses = objective.losses(output, batch, weights)
            for name, loss in scaled_losses.items():
                # Reported losses are without their coefficients; metrics have coefficient 0.
                coefficient = coefficients[name] or 1.0
                mean = loss.detach()
                if scaler is not None:
                    mean = mean / scaler.scale
                losses.named[name] += mean if coefficient == 1.0 else mean / coefficient
            roots = (loss for name, loss in scaled_losses.items() if coefficients[name])
            return StageOutput(_sum(roots), extra)

        return forward

    return {number: build(number) for number in range(len(run.chunks))}


def _sum(losses: Iterable[Tensor]) -> Tensor:
    """Add losses; a single loss is returned itself."""
    first, *others = losses
    for loss in others:
        first = first + loss
    return first


def _qk_clip_scales(run: Run) -> Mapping[str, Tensor]:
    """Return the factors by which --qk-clip scales rows of query and key matrices."""
    options = run.plan.config.qk_clipping
    if not options.qk_clip:
        return {}
    return row_factors(run.chunks, run.ctx.data_axes()["dense"], options)


def _finish_routers(run: Run, is_applied: Bool[Tensor, ""] | None) -> Float[Tensor, "L n"]:
    """Update the biases of this rank's routers; return their statistics by layer."""
    stats: dict[str, RouterStats] = {}
    for chunk in run.chunks:
        stats |= finish_step(chunk, run.ctx.axis("tp", "cp", "dp"), is_applied)
    rows = summarize(list(stats.values())) if stats else ()
    model = run.plan.config.model

    def layer(name: str) -> int:  # blocks.3.moe.router, mtp.0.block.moe.router
        stack, number, *_ = name.split(".")
        return int(number) + model.num_layers * (stack == "mtp")

    by_layer = {layer(name): row for name, row in zip(stats, rows, strict=True)}
    zeros = torch.zeros(len(SUMMARY_COLUMNS), device=run.ctx.device)
    depth = model.num_layers + model.mtp_num_layers
    return torch.stack([by_layer.get(layer, zeros) for layer in range(depth)])
