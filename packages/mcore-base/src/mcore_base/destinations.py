"""Checks, before a command starts, that its output folder or file can be written."""

import os
import shutil
import tempfile
from pathlib import Path


def check_folder(flag: str, path: str | Path) -> None:
    """Check that a folder can be created or written to, without leaving anything behind.

    Raises:
        ValueError: if not, with the flag, the folder and the obstacle.
    """
    if os.path.isfile(path):
        raise ValueError(f"{flag} {path} is a file: give a folder.")
    _try_out(flag, path, Path(path).absolute())


def check_file(flag: str, path: str | Path) -> None:
    """Check that a file can be written, or be created with its folders.

    Raises:
        ValueError: if not, with the flag, the file and the obstacle.
    """
    if os.path.isdir(path):
        raise ValueError(f"{flag} {path} is a folder: give a file.")
    if not os.path.exists(path):
        _try_out(flag, path, Path(path).absolute().parent)
    elif not os.access(path, os.W_OK):
        raise ValueError(f"{flag} {path} is not writable: give another file.")


def _try_out(flag: str, path: str | Path, folder: Path) -> None:
    """Create the missing folders inside a temporary folder, which is then removed.

    Permission bits are not enough: /proc looks writable to root, and a name may be too long.
    The folders are not created at their final path, where another rank may run the same check.
    """
    parent = folder  # the deepest part of the path that exists
    while not os.path.lexists(parent):
        parent = parent.parent
    try:
        if not parent.exists():
            raise ValueError(f"{flag} {path} cannot be made: {parent} is a broken link.")
        if not parent.is_dir():
            raise ValueError(f"{flag} {path} cannot be made: {parent} is a file.")
        trial = Path(tempfile.mkdtemp(dir=parent, prefix=".mcore_trial_"))
        try:
            (trial / folder.relative_to(parent)).mkdir(parents=True, exist_ok=True)
        finally:
            shutil.rmtree(trial)
    except OSError as error:
        raise ValueError(
            f"{flag} {path} cannot be made in {parent} ({error.strerror}). "
            "Give a path that this user may write to."
        ) from error
