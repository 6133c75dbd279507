"""Output folders of commands: checked before a command starts, removed if it fails."""

import logging
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_base.atomic_files import sync_folder
from mcore_base.destinations import check_folder
from mcore_base.stores import is_store
from mcore_base.terminal import size_text
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.recognition import folder_format
from mcore_ckpt.storage.folder_lock import FolderLock
from mcore_ckpt.storage.paths import (
    RELEASE,
    TRACKER,
    is_complete,
    latest_step,
    make_fresh,
    remove,
    step_folder,
)

log = logging.getLogger(__name__)


def check_place(output: Path, *inputs: Path) -> None:
    """Raise ValueError if an output is inside an input or a step of a run, or not writable."""
    if is_store(output):
        return
    target = output.resolve()
    for source in (folder for folder in inputs if not is_store(folder)):
        source_path = source.resolve()
        if source_path.is_dir() and (source_path == target or source_path in target.parents):
            raise ValueError(
                f"--output {output} is inside {source}, which is read and must stay unchanged: "
                "give another folder."
            )
    for folder in (target, *target.parents):
        is_step = folder.name == RELEASE or folder.name.startswith("iter_")
        if is_step and (folder.parent / TRACKER).is_file():
            raise ValueError(
                f"--output {output} cannot be made: {folder} is a step of the run "
                f"{folder.parent}, which the run may delete: give a folder outside of the run."
            )
    check_folder("--output", output)


def check_run_folder(output: Path) -> None:
    """Raise ValueError if a run folder contains a checkpoint of another format."""
    step = latest_step(output)
    folders = [output] if step is None else [output, step_folder(output, step)]
    for folder in folders:
        if (form := folder_format(folder)) not in ("", "mcore"):
            raise ValueError(
                f"--output {output} holds a checkpoint in the format {form} ({folder}): give "
                "a new folder, or a run folder of mcore."
            )


def check_room(output: Path, num_bytes: int) -> None:
    """Raise ValueError if the disk has less free space than the output needs."""
    if is_store(output):
        return
    target = output.resolve()
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise CheckpointError(
            f"--output {output} needs {size_text(num_bytes)}, and its disk has "
            f"{size_text(free)} free: make room, or give a folder on another disk."
        )


@contextmanager
def fresh_step(run_folder: Path, step: int | str) -> Iterator[Path]:
    """Lock a run folder and yield a new folder in it for a step, which the caller commits.

    After an error the new folder is removed. Saves of training do not use this function: the
    next save removes the folder of a failed one.
    """
    with _unmade(run_folder), FolderLock(run_folder):
        final = step_folder(run_folder, step)
        if is_complete(final):
            raise CheckpointError(
                f"{final} already holds a complete checkpoint, which is never overwritten: "
                "give another --output."
            )
        target = make_fresh(final)
        try:
            yield target
        except BaseException:
            # An incomplete step would block the next attempt.
            if not (is_complete(target) and latest_step(run_folder) == step):
                remove(target)
            raise


@contextmanager
def atomic_dir(output: Path) -> Iterator[Path]:
    """Yield a folder to write to; it becomes ``output`` on success and is removed otherwise.

    The folder is in ``.<output>.partial`` next to the output, which this process locks by a
    ``FolderLock``. Folders of killed processes there are removed first.

    Raises:
        ValueError: if the output exists and is not empty, or cannot be replaced.
        CheckpointError: if another live process is writing to the same output.
    """
    if output.is_symlink():
        output = output.resolve()  # replace the target of a link, not the link
    _check_free(output)
    work_folder = output.with_name(f".{output.name}.partial")
    unfinished = work_folder / uuid.uuid4().hex  # unique, even if the lock is lost
    with _unmade(output), _held(work_folder) as lock:
        _check_free(output)
        for remains in (entry for entry in work_folder.iterdir() if entry.is_dir()):
            log.warning("removing %s of a killed command", remains)
            shutil.rmtree(remains)
        unfinished.mkdir()
        try:
            yield unfinished
            lock.check()
            if output.exists():
                output.rmdir()
            unfinished.rename(output)
            sync_folder(output.parent)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _check_free(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not empty: give a new folder.")
    target = output.resolve()
    if target.is_mount() or target == Path.cwd():
        what = "a mount point" if target.is_mount() else "the working directory of this command"
        raise ValueError(
            f"{output} is {what}, which the output cannot replace: give a new folder in it."
        )


@contextmanager
def _held(folder: Path) -> Iterator[FolderLock]:
    """Lock a folder; remove it at the end unless another process waits for it."""
    lock = FolderLock(folder)
    try:
        with lock:
            yield lock
    finally:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def _unmade(folder: Path) -> Iterator[None]:
    """After an error, remove the empty folders of a path that did not exist before."""
    absent: list[Path] = []
    if not is_store(folder):
        absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for created in (path for path in absent if path.is_dir()):
            if any(created.iterdir()):
                break
            created.rmdir()
        raise
