"""Checks, before anything starts, that a command can write its outputs.

Standard library only, so that the process that starts ranks runs them too, and once.
"""

import os
from pathlib import Path

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


def check_folder(flag: str, path: str) -> None:
    """Refuse a folder that can neither be written in nor be made."""
    if Path(path).is_file():
        raise ValueError(f"{flag} {path} is a file: give a folder.")
    _check_place(flag, path, Path(path))


def check_file(flag: str, path: str) -> None:
    """Refuse a file that can neither be written nor be made, with its folders."""
    if Path(path).is_dir():
        raise ValueError(f"{flag} {path} is a folder: give a file.")
    if Path(path).exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{flag} {path} may not be written: give another file.")
    _check_place(flag, path, Path(path).absolute().parent)


def _check_place(flag: str, path: str, folder: Path) -> None:
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"{flag} {path} cannot be made: {there} is a file.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {path} cannot be written: {there} does not let you.")
