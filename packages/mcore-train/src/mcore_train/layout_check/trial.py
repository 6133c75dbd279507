"""Trains a small model for a few steps under one layout, and records all results.

Two layouts must agree, as whole logical tensors, on initial weights, logits, gradients of the
first step with their norm and losses, weights after some steps, and the state that a checkpoint
restores. ``mcore-train verify`` and the parity tests compare these.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_models.peft.config import PeftConfig, is_adapter
from mcore_models.peft.lora import MAGNITUDE_NAME
from mcore_models.protocol import MicroBatch, TrainableModel
from mcore_parallel.collectives import all_gather
from mcore_parallel.context_parallel.zigzag import zigzag_positions
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.runner import Payload
from mcore_parallel.rng import fill_normal_
from mcore_parallel.sharding import Piece, Shard
from mcore_parallel.testing.ranks import gather_logical
from mcore_train.assembly import Run, Tables, assemble
from mcore_train.batches.datasets import Datasets
from mcore_train.batches.micro_batches import train_batches, valid_batches
from mcore_train.checkpoints.adapter_bases import model_shards
from mcore_train.checkpoints.resuming import load_run, optimizer_shards, save_run
from mcore_train.checkpoints.side_state import fp8_shards, rng_shards
from mcore_train.config import LoadConfig, SaveConfig
from mcore_train.evaluation import evaluate
from mcore_train.layout_check.rows import AnyRows
from mcore_train.loop import one_step
from mcore_train.reporting.interval import Interval
from mcore_train.resolution import Plan
from mcore_train.step import StepResult, backward

VECTOR_STD = 0.2
"""Standard deviation of noise on biases and norm weights: zeros and ones hide faults."""

LEAST_NUDGE = 2.0**-16
"""Least relative change of a nudged weight. A last bit of float32 changes hardly any number of
fp8, so trials that differ by one might all round alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Results of one layout; tensors are logical and whole."""

    losses: list[float]
    """Mean token loss of every step."""
    aux_loss: float
    """Auxiliary loss of experts in the first step."""
    grad_norm: float
    """Gradient norm of the first step, before clipping."""
    logits: dict[str, Tensor]
    """Logits of the first step's rows, with the initial weights."""
    gradients: dict[str, Tensor]
    """Gradients of the first step, summed over ranks, before clipping."""
    updates: dict[str, Tensor]
    """Weights after the saved step minus initial weights."""
    initial: dict[str, Tensor]
    reported: dict[str, float] = field(default_factory=dict)
    """Numbers of the report over all steps, by name."""
    validation: dict[str, float] = field(default_factory=dict)
    """Validation loss and tokens after the last step; empty if the run does not validate."""
    saved: str = ""
    """Fingerprint of the saved state that any layout can load; empty: nothing was saved."""
    final: str = ""
    """Fingerprint of all state after all steps without a stop."""
    resumed: str = ""
    """Fingerprint of all state after all steps with a stop and a resume in between."""


def build_run(
    plan: Plan,
    ctx: ParallelContext,
    rows: AnyRows,
    *,
    dtype: torch.dtype,
    tables: Tables | None = None,
    nudge_seed: int = 0,
) -> Run:
    """Assemble a run on this rank; noise replaces zeros and ones, which would hide faults.

    Args:
        plan: of a small run.
        ctx: its layout.
        rows: to train and validate on.
        dtype: of parameters and activations.
        tables: see ``assemble``.
        nudge_seed: see ``run_trial``.
    """
    # Scale the noise so that adapters add as much as the model computes: larger adapters
    # would amplify rounding errors.
    adapter_std = VECTOR_STD / max(1.0, plan.config.peft.scale)

    def shift_vectors(weights: Mapping[str, Shard]) -> None:
        for name, shard in weights.items():
            std = adapter_std if is_adapter(name) else VECTOR_STD
            for piece in shard.pieces:
                if len(shard.shape) == 1 or is_adapter(name):  # B of adapters is zero
                    before = piece.data.clone()
                    if name.endswith(MAGNITUDE_NAME):  # norms, which layouts round differently
                        before.fill_(1.0)
                    place = {"name": name, "shape": shard.shape, "offsets": piece.offsets}
                    fill_normal_(piece.data, seed=plan.config.run.seed + 1, std=std, **place)
                    piece.data.add_(before)
                if nudge_seed:
                    _nudge(piece.data, nudge_seed, dtype)

    return assemble(
        plan,
        ctx,
        datasets=Datasets(train=rows, valid=rows),
        dtype=dtype,
        prepare=shift_vectors,
        tables=tables,
    )


def _nudge(weights: Tensor, seed: int, dtype: torch.dtype) -> None:
    share = max(torch.finfo(dtype).eps / 2, LEAST_NUDGE)
    draw = torch.Generator(weights.device).manual_seed(seed)
    signs = torch.empty_like(weights, dtype=torch.float64).uniform_(-1, 1, generator=draw)
    weights.copy_(weights.double() * (1 + share * signs.sign()))


def _nudge_loaded(run: Run, seed: int) -> None:
    for shard in run.data_parallel.weight_shards().values():
        for piece in shard.pieces:
            _nudge(piece.data, seed, run.dtype)
    run.optimizer.refresh(from_parameters=True)
    run.optimizer.restart_average()


def run_trial(
    plan: Plan,
    ctx: ParallelContext,
    rows: AnyRows,
    *,
    dtype: torch.dtype = torch.float64,
    folder: Path | None = None,
    saved_step: int = 0,
    nudge_seed: int = 0,
    start: LoadConfig | None = None,
) -> Trial:
    """Train to the end of the plan; all ranks of the context call it together.

    Args:
        plan: of a small run.
        ctx: its layout.
        rows: to train on, as many as the plan's steps take.
        dtype: of parameters and activations.
        folder: for a checkpoint; None: nothing is saved.
        saved_step: step after which weights are compared and saved; 0: the last.
        nudge_seed: changes each weight of one rank by a last bit of ``dtype``, or by
            ``LEAST_NUDGE``, so that numbers round differently; 0: no change.
        start: checkpoint that the run loads before its first step; None: none.
    """
    saved_step = saved_step or plan.train_iters
    if folder is not None:
        saving = SaveConfig(save=str(folder))
        plan = replace(plan, config=replace(plan.config, saving=saving))
    run = build_run(plan, ctx, rows, dtype=dtype, nudge_seed=nudge_seed)
    if start is not None:
        run = load_start(run, start)
        if nudge_seed:
            _nudge_loaded(run, nudge_seed)
    with run.recorder or nullcontext():
        trial = _observe(run, folder, saved_step)
    if folder is not None:
        trial = replace(trial, resumed=_continue(plan, ctx, rows, dtype, folder))
    return trial


def _observe(run: Run, folder: Path | None, saved_step: int) -> Trial:
    plan, ctx = run.plan, run.ctx
    initial = whole_weights(run)
    batches = train_batches(run)
    first = next(batches)
    logits = gather_logical(logit_shards(run, first), ctx.world)
    unscale = (
        1.0 if run.precision.loss_scaler is None else 1.0 / run.precision.loss_scaler.value
    )
    gradients: dict[str, Tensor] = {}

    def keep_gradients() -> None:
        summed = gather_logical(run.data_parallel.grad_shards(), ctx.world)
        gradients.update({name: gradient * unscale for name, gradient in summed.items()})

    if run.recorder is not None:
        backward(run, first)  # warm-up, so that the compared step replays the graph
    interval = Interval(run)
    result = one_step(run, iter([first]), keep_gradients)
    interval.add(result)
    step_losses = [_mean_loss(run, result)]
    while run.progress.iteration < saved_step:
        step_losses.append(train_one(run, next(batches), interval))
    after = whole_weights(run)
    saved = ""
    if folder is not None:
        save_run(run)  # also gathers weights in full that were gathered in fp8
        saved = fingerprint(run, with_loss_scale=False)
    while run.progress.iteration < plan.train_iters:
        step_losses.append(train_one(run, next(batches), interval))
    return Trial(
        losses=step_losses,
        aux_loss=sum_over(result.aux_loss, ctx),
        grad_norm=float(result.grad_norm),
        logits=logits,
        gradients=gradients,
        updates={name: after[name] - initial[name] for name in after},
        initial=initial,
        reported=_reported(interval),
        validation=_validation(run),
        saved=saved,
        final=fingerprint(run, with_streams=True) if folder is not None else "",
    )


def is_continued(run: Run, rows: AnyRows, folder: Path) -> bool:
    """Return whether a run resumed after one step ends with the same bits after the second.

    All ranks call it together.

    Args:
        run: changed in place.
        rows: to train on.
        folder: for the checkpoint.
    """
    config = replace(run.plan.config, saving=SaveConfig(save=str(folder)))
    run = replace(run, plan=replace(run.plan, config=config, train_iters=2))
    batches = train_batches(run)
    with run.recorder or nullcontext():
        train_one(run, next(batches))
        save_run(run)
        train_one(run, next(batches))
    resumed = _continue(run.plan, run.ctx, rows, run.dtype, folder)
    return resumed == fingerprint(run, with_streams=True)


def _continue(
    plan: Plan, ctx: ParallelContext, rows: AnyRows, dtype: torch.dtype, folder: Path
) -> str:
    """Resume a checkpoint in a run of another seed; return the fingerprint at the end."""
    other_run = replace(plan.config.run, seed=plan.config.run.seed + 7)
    run = build_run(
        replace(plan, config=replace(plan.config, run=other_run)), ctx, rows, dtype=dtype
    )
    run = load_folder(replace(run, plan=plan), folder)
    batches = train_batches(run)
    with run.recorder or nullcontext():
        while run.progress.iteration < plan.train_iters:
            train_one(run, next(batches))
    return fingerprint(run, with_streams=True)


def _reported(interval: Interval) -> dict[str, float]:
    report = interval.report()
    names = ("loss", "aux_loss", "grad_norm", "global_batch_size", "consumed_train_samples")
    return {name: float(getattr(report, name)) for name in names}


def _validation(run: Run) -> dict[str, float]:
    if not run.plan.config.evaluation.interval:
        return {}
    score = evaluate(run, *valid_batches(run, run.datasets.valid))
    return {"loss": score.loss, "tokens": float(score.num_tokens)}


def train_one(
    run: Run, batches: Sequence[MicroBatch], interval: Interval | None = None
) -> float:
    """Train one step; return the mean token loss over the whole step, equal on all ranks."""
    result = one_step(run, iter([batches]), lambda: None)
    if interval is not None:
        interval.add(result)
    return _mean_loss(run, result)


def _mean_loss(run: Run, result: StepResult) -> float:
    # Tensor ranks hold equal shares.
    return sum_over(result.loss, run.ctx) / run.ctx.tp.size


def sum_over(number: Tensor, ctx: ParallelContext) -> float:
    """Sum one number over all ranks, in their order."""
    return float(all_gather(number.detach().double().reshape(1), ctx.world).sum())


def whole_weights(run: Run) -> dict[str, Tensor]:
    """Gather the whole model, by logical name."""
    shards = run.data_parallel.weight_shards()
    run.data_parallel.wait_params()
    return gather_logical(shards, run.ctx.world)


def fingerprint(run: Run, *, with_streams: bool = False, with_loss_scale: bool = True) -> str:
    """Return a hash of a run's state, equal under any layout; all ranks call it together.

    The state is weights, main weights and moments, fp8 histories, the loss scale, and the
    counts of steps, samples and updates.

    Args:
        run: between two steps.
        with_streams: also hash the random streams, which only the same layout restores, and the
            optimizer's state as each rank holds it, which includes state that checkpoints might
            lack.
        with_loss_scale: also hash the loss scale, which only fp16 runs have.
    """
    shards = model_shards(run) | optimizer_shards(run) | fp8_shards(run)
    state = gather_logical(shards | (rng_shards(run) if with_streams else {}), run.ctx.world)
    scaler = (
        run.precision.loss_scaler.state()
        if run.precision.loss_scaler and with_loss_scale
        else {}
    )
    counts = (
        run.progress.iteration,
        run.progress.consumed_train_samples,
        run.progress.schedule_samples,
    )
    digest = hashlib.sha256(repr((scaler, counts, run.optimizer.num_steps)).encode())
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].flatten().contiguous().view(torch.uint8).numpy().tobytes())
    if with_streams:
        rank_digest = hashlib.sha256()
        for name, tensor in run.optimizer.own_state():
            rank_digest.update(name.encode())
            rank_digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        digest.update(repr(gather_json(rank_digest.hexdigest(), run.ctx.world)).encode())
    return digest.hexdigest()


def save_start(
    plan: Plan, ctx: ParallelContext, rows: AnyRows, dtype: torch.dtype, folder: Path, kind: str
) -> LoadConfig:
    """Save a checkpoint of a run with another seed; return the options that load it.

    Args:
        plan: of a small run.
        ctx: the layout that saves.
        rows: for its step.
        dtype: of parameters.
        folder: for the files.
        kind: ``weights``: a model without adapters; ``run``: all state after one step, with
            adapters on such a model.
    """
    config = plan.config
    run = replace(config.run, seed=config.run.seed + 11)
    base, steps = (SaveConfig(save=str(folder / name)) for name in ("base", "steps"))
    start = LoadConfig(load=base.save, finetune=True)
    if kind == "weights" or config.peft.peft != "none":
        plain = replace(config, peft=PeftConfig(), run=run, saving=base)
        save_run(build_run(replace(plan, config=plain), ctx, rows, dtype=dtype))
    if kind == "weights":
        return start
    other_plan = replace(plan, config=replace(config, run=run))
    trained = build_run(other_plan, ctx, rows, dtype=dtype)
    trained = replace(trained, plan=replace(plan, config=replace(config, saving=steps)))
    if config.peft.peft != "none":
        trained = load_start(trained, start)
    train_one(trained, next(train_batches(trained)))
    save_run(trained)
    return LoadConfig(load=steps.save)


def load_folder(run: Run, folder: Path) -> Run:
    """Load the latest checkpoint of a folder into a run, saved under any layout."""
    return load_start(run, LoadConfig(load=str(folder)))


def load_start(run: Run, start: LoadConfig) -> Run:
    """Load the checkpoint that ``start`` names into a run; see ``load_run``."""
    plan = replace(run.plan, config=replace(run.plan.config, loading=start))
    run = load_run(replace(run, plan=plan))
    if not run.origin.checkpoint:
        raise RuntimeError(f"{start.load or start.pretrained_checkpoint} holds no checkpoint")
    return run


def logit_shards(run: Run, batches: Sequence[MicroBatch]) -> dict[str, Shard]:
    """Return this rank's shards of a step's logits: ``rows.<n>.logits``, each ``[S, V]``.

    All ranks call it together; ranks without the last stage return no shards.
    """
    ctx, V = run.ctx, run.plan.vocab_size
    shards: dict[str, Shard] = {}

    def keep(model: TrainableModel, output: Payload, microbatch: int) -> None:
        logits = model.stage_logits(output)
        v = logits.shape[-1]
        begin, width = ctx.tp.rank * v, max(0, min(v, V - ctx.tp.rank * v))
        num_tokens, num_rows = logits.shape[:2]
        positions = zigzag_positions(num_tokens * ctx.cp.size, ctx.cp).tolist()
        first_row = (microbatch * ctx.dp.size + ctx.dp.rank) * num_rows
        for row in range(num_rows):
            pieces, offset = [], 0
            for start, length in _runs_of(positions):
                part = logits[offset : offset + length, row, :width].clone()
                pieces.append(Piece((start, begin), (length, width), part))
                offset += length
            shape = (num_tokens * ctx.cp.size, V)
            own_pieces = tuple(pieces) if width else ()
            shards[f"rows.{first_row + row}.logits"] = Shard(shape, run.dtype, own_pieces)

    for chunk in run.chunks:
        chunk.eval()
    with torch.no_grad():
        run.pipeline.forward(batches, keep)
    for chunk in run.chunks:
        chunk.train()
    return shards


def _runs_of(places: list[int]) -> list[tuple[int, int]]:
    """Group ascending positions into contiguous ranges: first position and length of each."""
    runs: list[tuple[int, int]] = []
    for number in places:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs
