"""Checks, before a command starts, that its output folder or file can be made."""

import os
import shutil
import tempfile
from pathlib import Path


def check_folder(flag: str, path: str | Path) -> None:
    """Refuse a folder that can neither be written in nor be made; leaves nothing behind.

    Raises:
        ValueError: with the flag, the folder and what is in the way.
    """
    if os.path.isfile(path):
        raise ValueError(f"{flag} {path} is a file: give a folder.")
    _try_out(flag, path, Path(path).absolute())


def check_file(flag: str, path: str | Path) -> None:
    """Refuse a file that can neither be written nor be made with its folders.

    Raises:
        ValueError: with the flag, the file and what is in the way.
    """
    if os.path.isdir(path):
        raise ValueError(f"{flag} {path} is a folder: give a file.")
    if not os.path.exists(path):
        _try_out(flag, path, Path(path).absolute().parent)
    elif not os.access(path, os.W_OK):
        raise ValueError(f"{flag} {path} may not be written: give another file.")


def _try_out(flag: str, path: str | Path, folder: Path) -> None:
    """Make the folders that are missing, in a fresh one beside them that is then removed.

    Permissions are not enough: /proc seems writable to root, and a name may be too
    long. Not at the place itself, which another rank may be trying out.
    """
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    try:
        if not there.exists():
            raise ValueError(f"{flag} {path} cannot be made: {there} is a link to nothing.")
        if not there.is_dir():
            raise ValueError(f"{flag} {path} cannot be made: {there} is a file.")
        trial = Path(tempfile.mkdtemp(dir=there, prefix=".mcore_trial_"))
        try:
            (trial / folder.relative_to(there)).mkdir(parents=True, exist_ok=True)
        finally:
            shutil.rmtree(trial)
    except OSError as error:
        raise ValueError(
            f"{flag} {path} cannot be made: {there} does not take it ({error.strerror}). "
            "Give a place that this user may write to."
        ) from error
