"""Checks, before anything starts, that a command can write its outputs.

Standard library only, so that the process that starts ranks runs them too, and once.
"""

from pathlib import Path

from mcore_ckpt.storage.destinations import check_file, check_folder
from mcore_ckpt.storage.paths import RELEASE, newest_step
from mcore_ckpt.storage.stores import as_path, is_store
from mcore_train.checkpoints.origin import continues_saved_run, loads_from_save
from mcore_train.composition import TrainConfig


def check_destinations(config: TrainConfig, *, is_reporter: bool = True) -> None:
    """Look where a run is to write; makes nothing.

    Args:
        config: of the run.
        is_reporter: whether this process is the one that writes the numbers of the run.

    Raises:
        ValueError: with the flag and what is in the way.
    """
    save = config.saving.save
    if save and not is_store(as_path(save)):
        check_folder("--save", str(as_path(save)))
    if save:
        _check_earlier_run(config)
    if is_reporter and config.logging.metrics_file:
        check_file("--metrics-file", config.logging.metrics_file)
    cache = config.data.data_cache_path
    if cache and not Path(cache).is_dir():  # one that is there may be for reading alone
        check_folder("--data-cache-path", cache)
    local = config.local_saving.non_persistent_local_ckpt_dir
    for option, folder in (
        ("--non-persistent-local-ckpt-dir", local),
        ("--optimizer-offload-dir", config.offloading.optimizer_offload_dir),
    ):
        if folder:
            check_folder(option, folder)


def _check_earlier_run(config: TrainConfig) -> None:
    """Refuse to begin anew in a folder that holds a run, and to delete what is continued."""
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
        mend = "leave out --finetune to continue it, or give another --save."
    else:
        mend = (
            f"give --load {save} (or --auto-resume) to continue it, another --save, or "
            "--overwrite to delete it."
        )
    raise ValueError(
        f"--save {save} holds {latest if latest == RELEASE else f'step {latest}'} of an "
        f"earlier run, and this one would begin anew over it: {mend}"
    )
