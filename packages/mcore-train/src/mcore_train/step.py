"""One training step: forward and backward of all micro-batches, sums, clip, update.

Nothing here waits for the device: results stay tensors until they are read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_models.protocol import MicroBatch
from mcore_models.qk_clip.row_factors import row_factors
from mcore_moe.routing.router_stats import SUMMARY, RouterStats, finish_step, summarize
from mcore_parallel.data_parallel.grads import clip_coefficient
from mcore_parallel.pipeline_parallel.runner import (
    Payload,
    PayloadShape,
    StageFunction,
    StageOutput,
    run_schedule,
)
from mcore_train.assembly import Run
from mcore_train.losses import StepLosses, count_valid, loss_weights


@dataclass(frozen=True, slots=True)
class StepResult:
    """Numbers of one step, on the device."""

    losses: Mapping[str, Float[Tensor, ""]]
    """This rank's parts of the mean losses, by name, the main one first: the sum over
    ``dp_cp`` and ``pp`` is the mean."""
    aux_loss: Float[Tensor, ""]
    """This rank's part of what experts add to the loss: the sum over the world is it."""
    grad_norm: Float[Tensor, ""]
    """Of all gradients, before clipping; equal on all ranks."""
    lr: float
    """Learning rate of the update; not applied where the step is skipped."""
    balance: Float[Tensor, "L n"] | None = None
    """How this rank's layers shared tokens out among experts: what ``mcore_moe.SUMMARY`` names;
    0 for layers of other stages and without experts."""
    is_skipped: bool = False
    """Whether weights stayed as they are, since scaled gradients overflowed."""

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
    return update(run, backward(run, batches), lr, weight_decay, before_update)


def update(
    run: Run,
    losses: StepLosses,
    lr: float,
    weight_decay: float,
    before_update: Callable[[], None] | None = None,
) -> StepResult:
    """Update weights by the gradients of ``backward``: what ``train_step`` does after it.

    Args:
        run: changed in place.
        losses: of ``backward``.
        lr: see ``train_step``, as are the next two.
        weight_decay: see there.
        before_update: see there.
    """
    factors = _clipped_rows(run)
    norm = run.optimizer.grad_norm()
    scaler, unscale = run.loss_scaler, 1.0
    if scaler is not None:
        unscale = 1.0 / scaler.value
        # The norm is summed over the world, so that all ranks skip a step or none.
        is_finite = bool(norm.isfinite())
        norm = norm * unscale
        if scaler.update(is_finite=is_finite) and not is_finite:
            balance = _finish_routers(run) if run.plan.config.experts.num_experts else None
            return StepResult(losses.named, losses.aux_loss, norm, lr, balance, is_skipped=True)
    max_norm = run.plan.config.optimizer.clip_grad
    scale = (clip_coefficient(norm, max_norm) if max_norm else 1.0) * unscale
    if before_update is not None:
        before_update()
    if run.fp8_scales is not None:
        run.fp8_scales.move_on()
    run.optimizer.step(lr, weight_decay, scale, factors)
    balance = _finish_routers(run) if run.plan.config.experts.num_experts else None
    return StepResult(losses.named, losses.aux_loss, norm, lr, balance)


def _clipped_rows(run: Run) -> Mapping[str, Tensor]:
    """Return the factors of rows of queries and keys that --qk-clip scales."""
    options = run.plan.config.qk_clipping
    if not options.qk_clip:
        return {}
    return row_factors(run.chunks, run.ctx.data_axes()["dense"], options)


def _finish_routers(run: Run) -> Float[Tensor, "L n"]:
    """Close the step for the routers of this rank; return what they did, by layer."""
    stats: dict[str, RouterStats] = {}
    for chunk in run.chunks:
        stats |= finish_step(chunk, run.ctx.axis("tp", "cp", "dp"))
    rows = summarize(list(stats.values())) if stats else ()
    model = run.plan.config.model

    def layer(name: str) -> int:  # blocks.3.moe.router, mtp.0.block.moe.router
        stack, number, *_ = name.split(".")
        return int(number) + model.num_layers * (stack == "mtp")

    by_layer = {layer(name): row for name, row in zip(stats, rows, strict=True)}
    nothing = torch.zeros(len(SUMMARY), device=run.ctx.device)
    depth = model.num_layers + model.mtp_num_layers
    return torch.stack([by_layer.get(layer, nothing) for layer in range(depth)])


def backward(run: Run, batches: Sequence[MicroBatch]) -> StepLosses:
    """Compute the gradients of one global batch: summed over all ranks, not clipped.

    With ``--cuda-graph-impl full_iteration`` as a graph, once it is recorded.
    """
    compute = partial(_backward, run)
    return compute(batches) if run.recorder is None else run.recorder(compute, batches)


def _backward(run: Run, batches: Sequence[MicroBatch]) -> StepLosses:
    run.data_parallel.zero_grad()
    # Ranks that sum the count are of one stage: all of them need it, or none does.
    last = run.chunks[-1]
    num_valid = count_valid(last, batches, run.ctx) if last.stage.has_loss else {}
    losses = StepLosses(run.ctx.device, last.loss_coefficients)
    noting = nullcontext() if run.fp8_scales is None else run.fp8_scales.noting()
    with run.data_parallel.no_sync(), run.keeping_casts(), noting:
        run_schedule(
            run.step_actions(len(batches)),
            stage_functions(run, batches, num_valid, losses),
            axis=run.ctx.pp,
            back=run.ctx.pp_back,
            shape=partial(payload_shape, run, batches),
            dtype=run.dtype,
            device=run.ctx.device,
            before_last_backward=run.data_parallel.start_sync,
            before_last_weights=run.data_parallel.start_weight_sync,
            weight_queue=run.weight_queue,
            turns=run.turns,
            v_shaped=run.plan.config.pipeline.v_shaped,
            rendezvous="train" not in run.warmed_up,
            overlap=run.plan.config.pipeline.overlap_p2p_communication,
            batched=run.plan.config.pipeline.batch_p2p_communication,
        )
    run.warmed_up.add("train")
    run.data_parallel.finish()
    return losses


def stage_functions(
    run: Run,
    batches: Sequence[MicroBatch],
    num_valid: Mapping[str, Float[Tensor, ""]],
    losses: StepLosses,
) -> Mapping[int, StageFunction]:
    """Build what the pipeline calls for each model chunk of this rank, by chunk number."""
    aux_weight = 1.0 / (len(batches) * run.ctx.dp.size)
    has_aux = run.plan.config.experts.num_experts > 0
    scaler = run.loss_scaler

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
            weights = loss_weights(model, batch, num_valid, run.dtype)
            if scaler is not None:  # here, since the loss itself must be a root of backward
                weights = {name: each * scaler.scale for name, each in weights.items()}
            found = model.losses(output, batch, weights)
            for name, loss in found.items():
                coefficient = model.loss_coefficients[name]
                mean = loss.detach()
                if scaler is not None:
                    mean = mean / scaler.scale
                losses.named[name] += mean if coefficient == 1.0 else mean / coefficient
            return StageOutput(_sum(found.values()), extra)

        return forward

    return {number: build(number) for number in range(len(run.chunks))}


def _sum(losses: Iterable[Tensor]) -> Tensor:
    """Add losses; one alone stays the tensor that it is."""
    first, *others = losses
    for loss in others:
        first = first + loss
    return first


def payload_shape(
    run: Run, batches: Sequence[MicroBatch], microbatch: int, sender: int
) -> PayloadShape:
    """Shape of what a stage sends on, as this rank holds it.

    Read off the micro-batch itself, which every stage has, so that lengths may differ from
    one micro-batch to the next without a message.
    """
    cuts = run.ctx.tp.size if run.plan.config.parallelism.sequence_parallel else 1
    return run.chunks[0].payload_shape(batches[microbatch], sender, cuts)
