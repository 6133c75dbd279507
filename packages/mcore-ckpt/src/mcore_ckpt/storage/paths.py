"""Where things stand on disk, and how they get there whole.

A run folder holds one folder a step and ``latest_checkpointed_iteration.txt``, the only
pointer. A step exists for readers when its ``index.json`` does; that file is written last,
under another name, made durable and renamed, then the pointer the same way. A folder without
an index is garbage of an interrupted save. A step is never written over: a second save of it
goes to ``<step>.incoming`` and takes the place of the first by renames once it is whole.
"""

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
"""Marks a folder of adapters."""

TRACKER = "latest_checkpointed_iteration.txt"
"""Name of the pointer to the newest step of a run folder."""

RELEASE = "release"
"""The step of weights that come from no training run, such as a conversion's."""

_MOST_DIGITS = 18
_INCOMING = ".incoming"
_REPLACED = ".replaced"
_GARBAGE = ".garbage."
_FOREIGN = (".metadata", "metadata.json", "common.pt")


def path_within(folder: Path, name: str) -> Path:
    """Return the path of a file that a foreign list names, inside the list's folder.

    Symbolic links are followed: caches of Hugging Face's hub are made of them.

    Raises:
        CheckpointError: if ``name`` is absolute or climbs out of the folder.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(
            f"{folder} lists the file {name!r}, outside of the folder: nothing there is read."
        )
    return folder / name


def step_folder(run_folder: str | Path, step: int | str) -> Path:
    """Return where a step stands: ``iter_0000100``, or ``release``.

    Raises:
        ValueError: if ``step`` is neither a number from 0 nor ``release``.
    """
    if step == RELEASE:
        return as_path(run_folder) / RELEASE
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"a step is a number from 0, or {RELEASE!r}; not {step!r}")
    return as_path(run_folder) / f"iter_{step:07d}"


def is_complete(folder: str | Path) -> bool:
    """Whether a folder holds a checkpoint that was saved to its end."""
    return (as_path(folder) / INDEX).is_file()


def is_hf_folder(folder: str | Path) -> bool:
    """Whether a folder holds a Hugging Face model or adapters, and no checkpoint of ours."""
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
        The step, or ``"release"``; None where nothing was ever saved.

    Raises:
        ValueError: if the pointer says neither.
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
    """List the numbered steps of a run folder that are whole, ascending."""
    steps = []
    for folder in as_path(run_folder).glob("iter_*"):
        digits = folder.name.removeprefix("iter_")
        if digits.isdecimal() and is_complete(folder):
            steps.append(int(digits))
    return sorted(steps)


def newest_step(run_folder: str | Path) -> int | str | None:
    """Return the step of the pointer; without one, the newest whole step, or None.

    A run that was killed as it finished its first step has none yet.
    """
    latest = latest_step(run_folder)
    if latest is not None:
        return latest
    return max(complete_steps(run_folder), default=None)


def resolve_folder(path: str | Path, step: int = 0, *, takes_any: bool = False) -> Path:
    """Find the checkpoint that a user means by a run folder, a step folder or a model folder.

    Args:
        path: one of the three; a Hugging Face folder is its own checkpoint.
        step: which of a run folder's; 0: the ``newest_step``.
        takes_any: whether a step of another program (Megatron's, torch's) will do.

    Raises:
        ValueError: if there is none; says what is there instead. If a step is chosen of a
            folder that has no others.
    """
    path = as_path(path)
    if is_complete(path) or is_hf_folder(path):
        if step and path.name != step_folder(path, step).name:
            raise ValueError(
                f"--ckpt-step {step} chooses a step of a run folder, and {path} is one "
                "checkpoint: leave it out, or give the run folder."
            )
        return path
    if not path.is_dir():
        raise ValueError(f"{path} is no folder: give a run folder or a step folder.")
    wanted = step or newest_step(path)
    place = path if wanted is None else step_folder(path, wanted)
    found = None if wanted is None else _find(place)
    if found is not None:
        return found
    foreign = _foreign_files(place)
    if foreign and takes_any:
        return place
    if foreign:
        raise ValueError(
            f"{place} holds {foreign[0].name}, a file of another format: mcore-ckpt convert "
            "megatron-to-mcore makes a checkpoint of Megatron's, dcp-to-mcore of others'."
        )
    steps = complete_steps(path)
    there = f"Complete steps there: {', '.join(map(str, steps)) or 'none'}."
    if wanted is None:
        inner = [] if is_store(path) else sorted(path.glob(f"*/{TRACKER}"))
        there = f"Give {inner[0].parent}, which does." if inner else there
        raise ValueError(f"{path} holds neither {INDEX} nor {TRACKER}. {there}")
    raise ValueError(f"{place} holds no complete checkpoint (no {INDEX}). {there}")


def _find(folder: Path) -> Path | None:
    # A kill between the two renames of a replacement leaves one of the other names.
    for suffix in ("", _INCOMING, _REPLACED):
        candidate = folder.with_name(folder.name + suffix)
        if is_complete(candidate):
            return candidate
    return None


def make_fresh(folder: Path, *, replace: bool = False) -> Path:
    """Make the empty folder that a save writes to; garbage in its way is put aside.

    Args:
        folder: the step's.
        replace: what a complete checkpoint of this step means: save beside it and take its
            place when whole, or refuse.

    Returns:
        Where to write; hand it to ``commit``.
    """
    _repair(folder)
    _check_ours(folder)
    if is_complete(folder):
        if not replace:
            raise CheckpointError(
                f"{folder} already holds a complete checkpoint, which is never overwritten: "
                "save another step or to another folder, or replace it."
            )
        if is_store(folder):
            raise CheckpointError(
                f"{folder} already holds a complete checkpoint, and an object store cannot "
                "swap one for another at once: delete it first, or save to another folder."
            )
        folder = folder.with_name(folder.name + _INCOMING)
    try:
        if is_store(folder):
            _delete(folder)
        elif folder.exists():
            # Deleting takes long: that waits until the new step is durable.
            folder.rename(folder.with_name(f"{folder.name}{_GARBAGE}{uuid.uuid4().hex}"))
        folder.mkdir(parents=True)
    except OSError as error:
        raise write_error(folder, error) from error
    return folder


def _check_ours(folder: Path) -> None:
    """Refuse to clear away a step of Megatron's, whose run folders look like ours."""
    if foreign := _foreign_files(folder):
        raise CheckpointError(
            f"{folder} holds {foreign[0].name}, which no save of ours writes: it is a "
            "checkpoint of another program, and stays. Save to a run folder of ours."
        )


def _foreign_files(folder: Path) -> list[Path]:
    """List files by which other programs' checkpoints are known."""
    named = [folder / name for name in _FOREIGN if (folder / name).is_file()]
    return [*named, *folder.glob("mp_rank_*")]


def commit(written: Path, run_folder: Path, step: int | str, index: bytes) -> Path:
    """Turn a written folder into the run's newest step: index, then pointer, each durable.

    Then deletes what earlier, interrupted saves left.

    Args:
        written: what ``make_fresh`` gave, with every other file in it durable.
        run_folder: holds the pointer.
        step: what it will point to.
        index: content of the index.

    Returns:
        Where the step stands now.
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
    """Delete what interrupted saves put aside; no step that anyone could read."""
    for aside in [*run_folder.glob("iter_*.*"), *run_folder.glob(f"{RELEASE}.*")]:
        name, _, kind = aside.name.partition(".")
        folder = aside.with_name(name)
        is_old = f".{kind}" == _REPLACED and is_complete(folder)
        is_half = f".{kind}" == _INCOMING and not is_complete(aside)
        if is_old or is_half or _GARBAGE in aside.name:
            remove(aside)
    # Pointers of saves that were killed before they took their name.
    for pointer in run_folder.glob(f".{TRACKER}.*"):
        pointer.unlink(missing_ok=True)


def _repair(folder: Path) -> None:
    """Finish a replacement: a whole ``.incoming`` becomes the step, what was there goes."""
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
    """Delete every step of a run folder, and first the pointer; one rank, lock held.

    Raises:
        CheckpointError: before anything is deleted, if a step is not ours.
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
    """Delete a step folder; its index first, so that no reader sees half of it."""
    (folder / INDEX).unlink(missing_ok=True)
    _delete(folder)


def _delete(folder: Path) -> None:
    if isinstance(folder, StorePath):
        folder.delete_tree()
    else:
        shutil.rmtree(folder, ignore_errors=True)
