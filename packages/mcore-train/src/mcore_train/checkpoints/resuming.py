"""Saves a run and resumes it: bitwise under the same layout, up to rounding under another.

A checkpoint holds logical tensors (``model.*``, ``optimizer.*``), which any layout loads, and
each rank's random streams (``rng.*``), which only the same layout can load. Everything else is
a few numbers in the index. One of them, the number of consumed sequences, determines the
position in the data.
"""

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.save_load.loading import load
from mcore_ckpt.save_load.local_saving import LocalSaver
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.index import ADAPTER, read_index
from mcore_data.datasets.blending import OrderedBlend
from mcore_data.datasets.epochs import EpochsDataset
from mcore_data.datasets.mixture import begins_at_steps
from mcore_data.tracing.data_plan import (
    PLAN_FILE,
    BatchSizePhase,
    DataPlan,
    parse_plan,
    samples_by_source,
)
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.update_rule import AVERAGE
from mcore_parallel.sharding import Shard
from mcore_train.assembly import Run, Tables, assemble
from mcore_train.batches.batch_ramp import BatchRamp
from mcore_train.batches.datasets import num_samples
from mcore_train.checkpoints.adapter_bases import (
    base_folder,
    check_adapter,
    check_model,
    describe_adapter,
    load_base,
    load_options,
    load_weights,
    model_description,
    quantize_weights,
    saved_weights,
)
from mcore_train.checkpoints.origin import (
    batch_sizes,
    carried_files,
    checkpoint_extra,
    find_checkpoint,
    starting_point,
)
from mcore_train.checkpoints.side_state import (
    fp8_shards,
    hf_words,
    rng_shards,
    side_numbers,
    take_fp8_histories,
    take_side_numbers,
    take_streams,
    wanted_fp8_shards,
)
from mcore_train.composition import TrainConfig
from mcore_train.config import RunConfig
from mcore_train.options.recipe import changed_options, write_recipe
from mcore_train.reporting.header import StartClock, read_shares
from mcore_train.resolution import Plan
from mcore_train.updating.lr_schedule import (
    LRSchedule,
    learning_rate,
    parse_schedule,
    reconcile,
)

log = logging.getLogger(__name__)

_MAIN, _AVERAGE = "optimizer.main.", f"optimizer.{AVERAGE}."


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Contents of a checkpoint of a run at one step; tensors are views, not copies."""

    shards: dict[str, Shard]
    extra: dict[str, Any]
    files: dict[str, bytes]
    folders: dict[str, Path]


def take_snapshot(
    run: Run, tokenizer_folder: Path | None = None, state: Mapping[str, Shard] | None = None
) -> Snapshot:
    """Return the contents of a checkpoint of this step, without copies of tensors.

    Weights that are gathered in fp8 are first gathered in full, over the data ranks.

    Args:
        run: its weights are read after unfinished gathers.
        tokenizer_folder: holds the run's tokenizer; None on ranks other than 0.
        state: the result of ``state_shards``, which is slow; None: computed here.
    """
    run.optimizer.refresh_in_full()
    return Snapshot(
        shards={**(state_shards(run) if state is None else state), **rng_shards(run)},
        extra=_extra(run),
        files=_files(run),
        folders={"tokenizer": tokenizer_folder} if tokenizer_folder else {},
    )


def state_shards(run: Run) -> dict[str, Shard]:
    """Return shards of weights and, if saved, optimizer state: views of the run's memory."""
    optimizer = optimizer_shards(run) if run.plan.config.saving.save_optim else {}
    return saved_weights(run) | optimizer | fp8_shards(run)


def save_run(run: Run) -> Path:
    """Write a checkpoint of this step below ``--save``; all ranks call it together.

    Returns:
        The step folder.
    """
    config = run.plan.config
    with _tokenizer_folder(run) as folder:
        snapshot = take_snapshot(run, folder)
        return save(
            config.saving.save,
            run.progress.iteration,
            snapshot.shards,
            world=run.ctx.world,
            extra=snapshot.extra,
            files=snapshot.files,
            folders=snapshot.folders,
            replace=True,
            retention=config.retention,
        )


def build_run(
    plan: Plan,
    ctx: ParallelContext,
    tables: Tables | None = None,
    start: StartClock | None = None,
) -> Run:
    """Assemble a run on this rank and load its checkpoint or initial weights.

    All ranks call it with equal plans. Initial weights are drawn only if some of them are not
    loaded: drawing takes seconds for each billion weights of a rank.

    Args:
        plan: see ``assemble``.
        ctx: the layout's groups.
        tables: see ``assemble``.
        start: takes the times of assembling and loading.

    Raises:
        ValueError: as ``assemble`` and ``load_run``.
        FileNotFoundError: as ``assemble``.
    """
    start = start or StartClock(since_process_began=False)
    draws_weights = not _loads_all_weights(plan.config, ctx)
    run = assemble(plan, ctx, tables=tables, draws_weights=draws_weights)
    summary = "initial weights drawn" if draws_weights else "no weights drawn: all are loaded"
    if not draws_weights and plan.config.peft.peft != "none":
        summary = "only adapters drawn: other weights are loaded"
    start.end("assembly")
    log.info("assembled in %.1f s, %s", start.parts_s["assembly"], summary)
    run = load_run(run)
    start.end("loading")
    return run


def _loads_all_weights(config: TrainConfig, ctx: ParallelContext) -> bool:
    """Whether ``load_run`` sets every weight of the run except adapters, or raises."""
    if config.strictness.may_leave_tensors:
        return False
    options = starting_point(config)
    folder = find_checkpoint(options.load, options.ckpt_step) if options.load else None
    if config.peft.peft != "none":
        return base_folder(config, folder) is not None
    if folder is not None or config.loading.pretrained_checkpoint:
        return True
    return _open_local(config, ctx, folder) is not None


def load_run(run: Run) -> Run:
    """Resume from ``--load``, or from ``--save`` with ``--auto-resume``, if a step exists.

    All ranks call it together.

    Args:
        run: as assembled; weights, optimizer, random streams and progress are set in place.

    Returns:
        The run with the checkpoint's batch sizes, schedule and origin; tensors and progress are
        those of ``run``. ``origin.checkpoint`` is empty if nothing was loaded.

    Raises:
        ValueError: if the checkpoint is of another model, if its schedule is not the flags',
            or if there is none and ``--exit-on-missing-checkpoint`` is given; if
            ``--peft-base-bits`` has no base that is kept elsewhere.
    """
    run = _load(run)
    quantize_weights(run)
    return run


def _load(run: Run) -> Run:
    options = starting_point(run.plan.config)
    folder = find_checkpoint(options.load, options.ckpt_step) if options.load else None
    origin = load_base(run, folder)
    if run.ctx.global_rank == 0:
        files = carried_files(run.plan.config, run.tokenizer)
        origin = replace(origin, carried_files=files)
    run = replace(run, origin=origin)
    if (continued := _load_local(run, folder)) is not None:
        return continued
    if folder is None:
        if options.exit_on_missing_checkpoint:
            raise ValueError(
                f"--load {options.load} holds no checkpoint: correct the path, or leave out "
                "--exit-on-missing-checkpoint."
            )
        if options.load and not origin.checkpoint:
            log.warning("no checkpoint in %s: starting from initial weights", options.load)
        return run
    extra = checkpoint_extra(folder)
    check_model(extra["model"], run.plan, folder)
    check_adapter(extra, run.plan, folder)
    if origin.checkpoint and ADAPTER not in extra:  # the folder is that of the base
        return run
    run = replace(run, origin=replace(origin, checkpoint=str(folder)))
    if options.finetune or "iteration" not in extra:
        load_weights(run, folder, saved_weights(run))
        run.optimizer.refresh(from_parameters=True)
        run.optimizer.restart_average()
        return run
    file = folder / PLAN_FILE
    data_plan_text = file.read_text("utf-8") if file.is_file() else ""
    plan = _plan_from(extra, run.plan, data_plan_text)
    options = run.plan.config.loading
    _load_state(run, folder, extra, load_optim=options.load_optim, load_rng=options.load_rng)
    return _continue_after(run, plan, extra, data_plan_text)


def _load_local(run: Run, folder: Path | None) -> Run | None:
    """Resume from the hosts' disks, if their step is not older than that of ``--load``.

    With ``--auto-resume`` also if ``--save`` has no step yet: local steps are this run's own.

    Returns:
        The run as ``load_run`` returns it; None if nothing was loaded from the hosts' disks.

    Raises:
        ValueError: if the step is of another layout, model or schedule.
    """
    local = run.plan.config.local_saving
    if (saver := _open_local(run.plan.config, run.ctx, folder)) is None:
        return None
    shards = state_shards(run)
    rng = rng_shards(run)
    extra = saver.load(shards | rng)
    take_fp8_histories(run)
    local_folder = Path(local.non_persistent_local_ckpt_dir)
    check_adapter(extra, run.plan, local_folder)
    check_model(extra["model"], run.plan, local_folder)
    data_plan_text = extra["files"].get(PLAN_FILE, "")
    plan = _plan_from(extra, run.plan, data_plan_text)
    take_streams(run, rng)
    with_optimizer = "num_steps" in extra
    if with_optimizer:
        run.optimizer.num_steps = extra["num_steps"]
    run.optimizer.refresh(from_parameters=not with_optimizer)
    if not with_optimizer:
        run.optimizer.restart_average()
    run = replace(run, origin=replace(run.origin, checkpoint=str(local_folder)))
    return _continue_after(run, plan, extra, data_plan_text)


def _open_local(
    config: TrainConfig, ctx: ParallelContext, folder: Path | None
) -> LocalSaver | None:
    """Open the local saver, if the run resumes from its step; all ranks call it together.

    Args:
        config: of the run.
        ctx: the layout's groups.
        folder: step of ``--load``; None if there is none.
    """
    options, local = starting_point(config), config.local_saving
    resumes = config.loading.auto_resume
    loads_state = bool(options.load) and not options.finetune
    if not local.non_persistent_local_ckpt_dir or not (resumes or loads_state):
        return None
    saver = LocalSaver(local, ctx.world)
    step = saver.latest()
    has_steps = folder is not None and not options.finetune
    durable_step = read_index(folder).extra.get("iteration", -1) if has_steps else -1
    if step is None or step < durable_step or (options.ckpt_step and not resumes):
        return None
    return saver


def _plan_from(extra: Mapping[str, Any], plan: Plan, data_plan_text: str) -> Plan:
    """Return the plan with a checkpoint's batch sizes, and with its schedule or the flags'."""
    plan = plan.continue_after(batch_sizes(extra, data_plan_text), extra["iteration"])
    saved, samples = extra["schedule"], extra["schedule_samples"]
    schedule = reconcile(saved, plan.schedule, plan.config.schedule, samples)
    return replace(plan, schedule=schedule)


def _continue_after(run: Run, plan: Plan, extra: Mapping[str, Any], data_plan_text: str) -> Run:
    """Set progress and loss scale to a checkpoint's, in place; return the run with ``plan``.

    Args:
        run: its tensors are loaded already.
        plan: the run's, with the checkpoint's batch sizes and schedule.
        extra: the checkpoint's description.
        data_plan_text: the checkpoint's data plan; empty: none.
    """
    ramp_of_data, run = run.plan.ramp, replace(run, plan=plan)
    progress = run.progress
    progress.iteration = extra["iteration"]
    progress.consumed_train_samples = extra["consumed_train_samples"]
    progress.schedule_samples = extra["schedule_samples"]
    progress.batch_size_phases = batch_sizes(extra, data_plan_text)
    _warn_of_changed_rate(run, parse_schedule(extra["schedule"], plan.schedule))
    take_side_numbers(run, extra)
    _warn_of_changed_seed(run, extra.get("recipe", {}).get("seed", RunConfig().seed))
    _check_data(run, data_plan_text, ramp_of_data)
    return run


def _warn_of_changed_rate(run: Run, saved: LRSchedule) -> None:
    """Warn if another batch size or schedule changes the learning rate from this step on."""
    plan, samples = run.plan, run.progress.schedule_samples
    size = plan.ramp.size_at(run.progress.consumed_train_samples)
    before = (
        run.progress.batch_size_phases[-1].batch_size
        if run.progress.batch_size_phases
        else size
    )
    rate, old_rate = learning_rate(plan.schedule, samples), learning_rate(saved, samples)
    if not (plan.ramp.past and size != before) and rate == old_rate:
        return
    log.warning(
        "step %d has a batch of %d sequences, and the step before had %d: the learning rate is "
        "%.6E; by the former schedule it would be %.6E. This run ends at step %d, the "
        "schedule at step %d.",
        *(run.progress.iteration + 1, size, before, rate, old_rate, plan.train_iters),
        plan.ramp.num_steps(plan.schedule.decay_samples),
    )


def _warn_of_changed_seed(run: Run, then: int) -> None:
    now = run.plan.config.run.seed
    if now != then:
        log.warning(
            "--seed %s continues a run of --seed %s: from step %s on the order of samples "
            "changes, so some samples repeat and some are skipped; give --seed %s to keep the "
            "order.",
            *(now, then, run.progress.iteration + 1, then),
        )


def data_plan(run: Run) -> DataPlan:
    """Return the data plan: which tokens each step of the run reads."""
    config = run.plan.config
    data = run.datasets.config or config.data
    dataset = run.datasets.train
    blend = isinstance(dataset, OrderedBlend)
    size = run.plan.ramp.size_at(run.progress.consumed_train_samples)
    return DataPlan(
        data=data,
        fim=config.fim,
        sequence_length=config.batch.seq_length,
        seed=config.run.seed,
        num_samples=num_samples(run.plan),
        stretches=tuple(run.progress.batch_size_phases) or (BatchSizePhase(1, 0, size),),
        iteration=run.progress.iteration,
        consumed_samples=run.progress.consumed_train_samples,
        working_folder=str(Path.cwd()),
        sources=tuple(run.datasets.sources),
        ledger=tuple(dataset.ledger(run.progress.consumed_train_samples)) if blend else (),
    )


def _files(run: Run) -> dict[str, bytes]:
    files = {**run.origin.carried_files} | {
        "recipe.toml": write_recipe(changed_options(run.plan.config)).encode()
    }
    if run.datasets.sources:
        files[PLAN_FILE] = data_plan(run).to_json().encode()
    return files


def _check_data(run: Run, plan_of_then: str, ramp_of_data: BatchRamp) -> None:
    """Compare the training data with those of the checkpoint; warn if they differ.

    Raises:
        ValueError: if a changed mixture would repeat or lose samples, or counts in steps of
            a run whose batch sizes were not known when the data were built.
    """
    if not plan_of_then or not run.datasets.sources:
        return
    then, now = parse_plan(plan_of_then), data_plan(run)
    old_counts, new_counts = samples_by_source(then), samples_by_source(now)
    mixture = now.data.data_mixture_path
    if mixture:
        expected = ramp_of_data.samples_before(run.progress.iteration + 1)
        if begins_at_steps(mixture) and expected != run.progress.consumed_train_samples:
            raise ValueError(
                f"--data-mixture-path {mixture} counts in steps, and batch sizes until step "
                f"{run.progress.iteration} were different: give from_sample instead."
            )
        if old_counts != new_counts:
            raise ValueError(
                f"--data-mixture-path {mixture} does not match the samples that the run has "
                f"read: after {then.consumed_samples} samples its sources would have given "
                f"{new_counts}, but they gave {old_counts}. Change only later phases."
            )
        return
    before, after = ([each["lengths_hash"] for each in p.sources] for p in (then, now))
    if before != after:
        log.warning("the training data differ from those that the run has read so far")
    elif not isinstance(run.datasets.train, EpochsDataset):
        _warn_of_changed_length(run, then.num_samples[0], now.num_samples[0])


def _warn_of_changed_length(run: Run, then: int, now: int) -> None:
    """Warn if another number of samples changes the order of data that are read repeatedly.

    As in Megatron, the order of several epochs depends on the number of samples of the run; the
    order of the first epoch alone does not.
    """
    if then == now:
        return
    for share in read_shares(run):
        epochs = share.epochs * max(then, now) / run.plan.train_samples
        if epochs > 1:
            log.warning(
                "the run was planned for %d samples and now for %d, %s %.2g times: the "
                "order of several epochs depends on that number, so from step %d on some "
                "samples repeat and some are skipped. Give the former --train-iters, or give "
                "the data by --data-mixture-path, where each epoch has an order of its own.",
                *(then, now, share.prefix or "mock data", epochs, run.progress.iteration + 1),
            )


def rewind(run: Run, folder: Path) -> None:
    """Load weights, optimizer, random streams and schedule of an earlier step, in place.

    The count of steps and the position in the data do not change. All ranks call it together.

    Args:
        run: changed in place.
        folder: of the step.
    """
    extra = checkpoint_extra(folder)
    run.data_parallel.wait_params()
    _load_state(run, folder, extra, load_optim=True, load_rng=True)
    run.progress.schedule_samples = extra["schedule_samples"]
    take_side_numbers(run, extra)


def _load_state(
    run: Run, folder: Path, extra: Mapping[str, Any], *, load_optim: bool, load_rng: bool
) -> None:
    """Load weights, optimizer state and, under the same layout, random streams."""
    with_optimizer = load_optim and "num_steps" in extra
    state = optimizer_shards(run) if with_optimizer else {}
    if not any(name.startswith(_MAIN) for name in read_index(folder).tensors):
        # The saved run had no main weights: they are copied from the weights.
        state = {name: shard for name, shard in state.items() if not name.startswith(_MAIN)}
    # An average that the saved run did not keep starts from the weights.
    has_average = any(name.startswith(_AVERAGE) for name in read_index(folder).tensors)
    if not has_average:
        state = {n: shard for n, shard in state.items() if not n.startswith(_AVERAGE)}
    shards = saved_weights(run) | state
    rng = rng_shards(run) if load_rng and _streams_fit(run, extra) else {}
    scales = wanted_fp8_shards(run, extra)
    wants_main = any(name.startswith(_MAIN) for name in state)
    wants_average = any(name.startswith(_AVERAGE) for name in state)
    parts = {"optimizer.": with_optimizer, _MAIN: wants_main, _AVERAGE: wants_average}
    parts |= {"rng.": rng, "fp8.": scales}
    ignore = tuple(prefix for prefix, is_taken in parts.items() if not is_taken)
    load(folder, shards | rng | scales, ignore=ignore, **load_options(run))
    take_fp8_histories(run)
    if rng:
        take_streams(run, rng)
    if with_optimizer:
        run.optimizer.num_steps = extra["num_steps"]
    run.optimizer.refresh(from_parameters=not wants_main)
    if not wants_average:
        run.optimizer.restart_average()


def optimizer_shards(run: Run) -> dict[str, Shard]:
    """Return shards of this rank's optimizer state, named ``optimizer.<kind>.<logical>``."""
    return {f"optimizer.{n}": shard for n, shard in run.optimizer.named_shards().items()}


def _extra(run: Run) -> dict[str, Any]:
    from mcore_train import __version__

    plan = run.plan
    extra: dict[str, Any] = {
        "model": model_description(plan),
        "iteration": run.progress.iteration,
        "consumed_train_samples": run.progress.consumed_train_samples,
        "schedule_samples": run.progress.schedule_samples,
        "stretches": [astuple(phase) for phase in run.progress.batch_size_phases],
        "schedule": asdict(plan.schedule),
        "versions": {"mcore-train": __version__, "torch": torch.__version__},
        "parallel": {"world_size": plan.world_size, **asdict(plan.config.parallelism)},
        "recipe": changed_options(plan.config),
        **describe_adapter(run),
        **side_numbers(run),
        "hf": {"config": hf_words(run)},
    }
    if plan.config.saving.save_optim:
        extra["num_steps"] = run.optimizer.num_steps
    return extra


def _streams_fit(run: Run, extra: Mapping[str, Any]) -> bool:
    """Whether the checkpoint has this layout, and so its random streams; else warn of noise."""
    plan = run.plan
    current = {"world_size": plan.world_size, **asdict(plan.config.parallelism)}
    # JSON has lists instead of tuples, and checkpoints lack newer options.
    saved = asdict(ParallelConfig()) | extra["parallel"]
    fits = json.dumps(saved, sort_keys=True) == json.dumps(current, sort_keys=True)
    model, experts = plan.config.model, plan.config.experts
    noise = {
        "--hidden-dropout": model.hidden_dropout,
        "--attention-dropout": model.attention_dropout,
        "--lora-dropout": plan.config.peft.lora_dropout,
        "--moe-input-jitter-eps": experts.num_experts and experts.moe_input_jitter_eps,
    }
    if drawn := [name for name, strength in noise.items() if strength and not fits]:
        names = " and ".join(drawn)
        log.warning(
            "the layout differs from the checkpoint's: new random streams for %s", names
        )
    return fits


@contextmanager
def _tokenizer_folder(run: Run) -> Iterator[Path | None]:
    """Yield a temporary folder with the tokenizer on rank 0; None on other ranks."""
    if run.tokenizer is None or run.ctx.global_rank != 0:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        run.tokenizer.save(folder)
        yield Path(folder)
