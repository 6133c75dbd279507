"""Folders and files of checkpoints, and their atomic commit.

A run folder has one folder for each step and ``latest_checkpointed_iteration.txt``, the only
pointer to the newest step. Readers see a step once its ``index.json`` exists. The index is
written last, under another name, made durable and renamed; then the pointer in the same way. A
folder without an index is garbage of an interrupted save. A step is never overwritten: a second
save of a step writes ``<step>.incoming``, which replaces the first by renames once it is
complete.
"""

import logging
import shutil
import uuid
from pathlib import Path

from mcore_base.atomic_files import sync_folder, write_durably
from mcore_base.stores import StorePath, as_path, is_store
from mcore_ckpt.errors import CheckpointError, write_error

INDEX = "index.json"
"""Name of the file that makes a folder a checkpoint."""

HF_CONFIG = "config.json"
"""Name of the file that makes a folder without an index a Hugging Face folder."""
PEFT_CONFIG = "adapter_config.json"
"""Name of the file that makes a folder one of adapters."""

TRACKER = "latest_checkpointed_iteration.txt"
"""Name of the pointer to the newest step of a run folder."""

log = logging.getLogger(__name__)

RELEASE = "release"
"""Step of weights that no training run made, such as those of a conversion."""

_MOST_DIGITS = 18
_INCOMING = ".incoming"
_REPLACED = ".replaced"
_GARBAGE = ".garbage."
_FOREIGN = (".metadata", "metadata.json", "common.pt")


def path_within(folder: Path, name: str) -> Path:
    """Return the path of a file that an index lists, inside the index's folder.

    Symbolic links are followed, since caches of Hugging Face's hub consist of links.

    Raises:
        CheckpointError: if ``name`` is absolute or leaves the folder.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(
            f"{folder} lists the file {name!r}, which is outside of the folder and not read."
        )
    return folder / name


def step_folder(run_folder: str | Path, step: int | str) -> Path:
    """Return the folder of a step: ``iter_0000100``, or ``release``.

    Raises:
        ValueError: if ``step`` is neither a number from 0 nor ``release``.
    """
    if step == RELEASE:
        return as_path(run_folder) / RELEASE
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"step {step!r} must be a number from 0, or {RELEASE!r}.")
    return as_path(run_folder) / f"iter_{step:07d}"


def is_complete(folder: str | Path) -> bool:
    """Whether a folder holds a complete checkpoint of mcore."""
    return (as_path(folder) / INDEX).is_file()


def is_hf_folder(folder: str | Path) -> bool:
    """Whether a folder holds a Hugging Face model or adapters, and no checkpoint of mcore."""
    path = as_path(folder)
    if any((path / name).is_file() for name in (INDEX, TRACKER)):
        return False
    return (path / HF_CONFIG).is_file() or is_peft_folder(path)


def is_peft_folder(folder: str | Path) -> bool:
    """Whether a folder holds adapters of Hugging Face PEFT."""
    return (as_path(folder) / PEFT_CONFIG).is_file()


def latest_step(run_folder: str | Path) -> int | str | None:
    """Read the pointer of a run folder.

    Returns:
        The step, or ``"release"``; None if nothing was saved.

    Raises:
        ValueError: if the pointer has other content.
    """
    try:
        text = (as_path(run_folder) / TRACKER).read_bytes().decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    if text == RELEASE:
        return RELEASE
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ValueError(
            f"{as_path(run_folder) / TRACKER} holds {text[:40]!r}: it must hold a step or "
            f"{RELEASE!r}."
        )
    return int(text)


def complete_steps(run_folder: str | Path) -> list[int]:
    """List the complete numbered steps of a run folder, ascending."""
    steps = []
    for folder in as_path(run_folder).glob("iter_*"):
        digits = folder.name.removeprefix("iter_")
        if digits.isdecimal() and is_complete(folder):
            steps.append(int(digits))
    return sorted(steps)


def newest_step(run_folder: str | Path) -> int | str | None:
    """Return the step of the pointer; without a pointer, the newest complete step, or None.

    A run that was killed while finishing its first step has no pointer.
    """
    latest = latest_step(run_folder)
    if latest is not None:
        return latest
    return max(complete_steps(run_folder), default=None)


def resolve_folder(path: str | Path, step: int = 0, *, takes_any: bool = False) -> Path:
    """Return the checkpoint folder for a run folder, a step folder or a model folder.

    Args:
        path: run folder, step folder, or Hugging Face folder.
        step: step of a run folder; 0: the ``newest_step``.
        takes_any: also accept steps of other programs (Megatron's, torch's).

    Raises:
        ValueError: if there is no checkpoint, with the steps that exist; or if ``step`` is
            given for a folder other than a run folder.
    """
    path = as_path(path)
    if is_complete(path) or is_hf_folder(path):
        if step and path.name != step_folder(path, step).name:
            raise ValueError(
                f"--ckpt-step {step} needs a run folder, and {path} is a single checkpoint: "
                "leave --ckpt-step out, or give the run folder."
            )
        return path
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder: give a run folder or a step folder.")
    wanted = step or newest_step(path)
    place = path if wanted is None else step_folder(path, wanted)
    complete = None if wanted is None else _find(place)
    if complete is not None:
        return complete
    foreign = _foreign_files(place)
    if foreign and takes_any:
        return place
    if foreign:
        raise ValueError(
            f"{place} holds {foreign[0].name}, a file of another format: convert it with "
            "mcore-ckpt convert megatron-to-mcore, or dcp-to-mcore for other programs."
        )
    steps = complete_steps(path)
    advice = f"Complete steps there: {', '.join(map(str, steps)) or 'none'}."
    if wanted is None:
        inner = [] if is_store(path) else sorted(path.glob(f"*/{TRACKER}"))
        advice = f"Give {inner[0].parent}, which holds it." if inner else advice
        raise ValueError(f"{path} holds neither {INDEX} nor {TRACKER}. {advice}")
    raise ValueError(f"{place} holds no complete checkpoint (no {INDEX}). {advice}")


def _find(folder: Path) -> Path | None:
    # A kill between the two renames of a replacement leaves the step under another name.
    for suffix in ("", _INCOMING, _REPLACED):
        candidate = folder.with_name(folder.name + suffix)
        if is_complete(candidate):
            return candidate
    return None


def make_fresh(folder: Path, *, replace: bool = False) -> Path:
    """Create the empty folder that a save writes to; moves garbage at its path aside.

    Args:
        folder: folder of the step.
        replace: if a complete checkpoint of this step exists, write next to it and replace it
            on commit, instead of raising.

    Returns:
        The folder to write to, for ``commit``.
    """
    _repair(folder)
    _check_ours(folder)
    if is_complete(folder):
        if not replace:
            raise CheckpointError(
                f"{folder} already holds a complete checkpoint, which is never overwritten: "
                "save another step, or to another folder."
            )
        if is_store(folder):
            raise CheckpointError(
                f"{folder} already holds a complete checkpoint, which cannot be replaced "
                "atomically in an object store: delete it first, or save to another folder."
            )
        folder = folder.with_name(folder.name + _INCOMING)
    try:
        if is_store(folder):
            _delete(folder)
        elif folder.exists():
            # Deleting is slow and waits until the new step is durable.
            folder.rename(folder.with_name(f"{folder.name}{_GARBAGE}{uuid.uuid4().hex}"))
        folder.mkdir(parents=True)
    except OSError as error:
        raise write_error(folder, error) from error
    return folder


def _check_ours(folder: Path) -> None:
    """Raise CheckpointError for steps of Megatron, whose run folders look like mcore's."""
    if foreign := _foreign_files(folder):
        raise CheckpointError(
            f"{folder} holds {foreign[0].name}: it is a checkpoint of another program, which "
            "is not overwritten. Save to a run folder of mcore."
        )


def _foreign_files(folder: Path) -> list[Path]:
    """List files that identify checkpoints of other programs."""
    named = [folder / name for name in _FOREIGN if (folder / name).is_file()]
    return [*named, *folder.glob("mp_rank_*")]


def commit(written: Path, run_folder: Path, step: int | str, index: bytes) -> Path:
    """Make a written folder the run's newest step: writes the index, then the pointer.

    Both are durable. Then deletes folders of interrupted saves.

    Args:
        written: folder of ``make_fresh``, in which all other files are durable.
        run_folder: folder of the pointer.
        step: step that the pointer will name.
        index: content of the index.

    Returns:
        Final folder of the step.
    """
    run_folder = as_path(run_folder)
    sync_folder(written)
    sync_folder(run_folder)
    write_durably(written / INDEX, index)
    folder = step_folder(run_folder, step)
    if written != folder:
        _repair(folder)
    write_durably(run_folder / TRACKER, str(step).encode())
    _clean(run_folder)
    return folder


def _clean(run_folder: Path) -> None:
    """Delete folders that interrupted saves moved aside; never a readable step."""
    for path in [*run_folder.glob("iter_*.*"), *run_folder.glob(f"{RELEASE}.*")]:
        name, _, kind = path.name.partition(".")
        folder = path.with_name(name)
        is_old = f".{kind}" == _REPLACED and is_complete(folder)
        is_partial = f".{kind}" == _INCOMING and not is_complete(path)
        if is_old or is_partial or _GARBAGE in path.name:
            remove(path)
    # Temporary pointers of saves that were killed before the rename.
    for pointer in run_folder.glob(f".{TRACKER}.*"):
        pointer.unlink(missing_ok=True)


def _repair(folder: Path) -> None:
    """Finish a replacement: a complete ``.incoming`` becomes the step."""
    incoming = folder.with_name(folder.name + _INCOMING)
    replaced = folder.with_name(folder.name + _REPLACED)
    if is_complete(incoming):
        if is_complete(folder):
            remove(replaced)
            folder.rename(replaced)
        remove(folder)
        incoming.rename(folder)
    elif not is_complete(folder) and is_complete(replaced):
        remove(folder)
        replaced.rename(folder)
    else:
        return
    sync_folder(folder.parent)
    remove(replaced)


def remove_steps(run_folder: str | Path) -> None:
    """Delete the pointer, then every step of a run folder; one rank, lock held.

    Raises:
        CheckpointError: before anything is deleted, if a step belongs to another program.
    """
    run_folder = as_path(run_folder)
    names = ("iter_*", RELEASE, f"{RELEASE}.*")
    folders = [folder for name in names for folder in run_folder.glob(name)]
    for folder in folders:
        _check_ours(folder)
    (run_folder / TRACKER).unlink(missing_ok=True)
    for folder in folders:
        remove(folder)


def remove(folder: Path) -> None:
    """Delete a step folder, its index first, so that no reader finds half a step.

    Logs a warning with the reason if files remain: that must not end a run.
    """
    try:
        (folder / INDEX).unlink(missing_ok=True)
        _delete(folder)
    except OSError as error:
        log.warning("%s could not be deleted completely, delete it by hand: %s", folder, error)


def _delete(folder: Path) -> None:
    if isinstance(folder, StorePath):
        folder.delete_tree()
        return
    shutil.rmtree(folder, ignore_errors=True)  # deletes all that it can
    if folder.exists():
        shutil.rmtree(folder)  # raises the first error
