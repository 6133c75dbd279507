"""Checks that a run can be planned and its outputs written, before anything starts.

Without torch: the process that starts ranks runs the checks too, so that faults are reported
once.
"""

from functools import partial
from pathlib import Path

from mcore_base.command_line import FaultCollector
from mcore_base.destinations import check_file, check_folder
from mcore_base.stores import as_path, is_store
from mcore_ckpt.storage.paths import RELEASE, newest_step
from mcore_models.families import Family
from mcore_train.checkpoints.origin import (
    check_schedule,
    continues_saved_run,
    loads_from_save,
)
from mcore_train.composition import TrainConfig
from mcore_train.guards.deadline import Deadline
from mcore_train.resolution import Plan, build_plan


def build_checked_plan(
    config: TrainConfig, world_size: int, family: Family, *, is_reporter: bool = True
) -> Plan:
    """Return a run's plan, after checks of its outputs and checkpoint; creates no file.

    Args:
        config: of the run.
        world_size: ranks of the job.
        family: of the model.
        is_reporter: whether this process writes the numbers of the run.

    Raises:
        OptionsError: (a ValueError) with every conflict, every output that cannot be written,
            and a schedule that is not that of the checkpoint to continue.
    """
    faults = FaultCollector()
    plan = faults.attempt(build_plan, config, world_size, family)
    faults.attempt(Deadline, config.run)
    faults.attempt(partial(check_destinations, is_reporter=is_reporter), config)
    if plan is not None:
        faults.attempt(check_frozen_model, plan)
        faults.attempt(check_schedule, plan)
    faults.raise_all()
    assert plan is not None
    return plan


def check_frozen_model(plan: Plan) -> None:
    """Raise ``ValueError`` if the objective's reference or teacher cannot be used."""
    if plan.config.objective.objective in ("pretrain", "sft"):
        return
    from mcore_train.objectives.reference import check_reference  # imports torch

    check_reference(plan)


def check_destinations(config: TrainConfig, *, is_reporter: bool = True) -> None:
    """Check that a run can write its outputs; creates no file.

    Args:
        config: of the run.
        is_reporter: whether this process writes the numbers of the run.

    Raises:
        OptionsError: (a ValueError) with each flag and why its output cannot be written.
    """
    faults = FaultCollector()
    save = config.saving.save
    if save and not is_store(as_path(save)):
        faults.attempt(check_folder, "--save", str(as_path(save)))
    if save and not faults.lines:
        faults.attempt(_check_earlier_run, config)
    if is_reporter and config.logging.metrics_file:
        faults.attempt(check_file, "--metrics-file", config.logging.metrics_file)
    cache = config.data.data_cache_path
    if cache and not Path(cache).is_dir():  # an existing cache may be read-only
        faults.attempt(check_folder, "--data-cache-path", cache)
    local = config.local_saving.non_persistent_local_ckpt_dir
    for option, folder in (
        ("--non-persistent-local-ckpt-dir", local),
        ("--optimizer-offload-dir", config.offloading.optimizer_offload_dir),
    ):
        if folder:
            faults.attempt(check_folder, option, folder)
    faults.raise_all()


def _check_earlier_run(config: TrainConfig) -> None:
    """Refuse a new run in a used folder, and --overwrite of the checkpoint to continue from."""
    save, overwrite = config.saving.save, config.saving.overwrite
    latest = newest_step(save)
    if overwrite and loads_from_save(config):
        raise ValueError(
            f"--overwrite would delete the run in --save {save} that this one starts from: "
            "leave it out, give another --save, or do not load from there."
        )
    if latest is None or overwrite or continues_saved_run(config):
        return
    if loads_from_save(config):
        remedy = "leave out --finetune to continue it, or give another --save."
    else:
        remedy = (
            f"give --load {save} (or --auto-resume) to continue it, another --save, or "
            "--overwrite to delete it."
        )
    raise ValueError(
        f"--save {save} holds {latest if latest == RELEASE else f'step {latest}'} of an "
        f"earlier run, which this new run would overwrite: {remedy}"
    )
