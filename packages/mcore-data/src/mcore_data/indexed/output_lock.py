"""Checks of the outputs before a long job starts.

Files can be written to the folder, no other process writes the same files, and a finished pair
of another command is replaced only with ``--overwrite``.
"""

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from mcore_data.indexed.index_format import bin_path
from mcore_data.indexed.manifest import manifest_path, read_manifest

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def make_folder(folder: Path, flag: str) -> None:
    """Make a folder for outputs; raises ValueError if no file can be written to it."""
    if "://" in flag:
        raise ValueError(
            f"{flag}: outputs are local files. Name a place on this machine, and copy .bin "
            "and .idx to the store once they are whole; from there they are read as they are."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{flag}: {folder} takes no files ({error.strerror}). Name a place in a folder "
            "that can be written."
        ) from error


def make_parent_folder(output_prefix: str | Path) -> None:
    """Make the folder of a pair, as ``make_folder``; of ``corpus/`` it is the folder corpus."""
    make_folder(Path(os.path.dirname(output_prefix)), f"--output-prefix {output_prefix}")


@contextlib.contextmanager
def only_writer(prefix: str | Path) -> Iterator[None]:
    """Hold the lock of the outputs; raises ValueError if another process holds it.

    The lock belongs to the process, not to its children, and ends with the process. On a file
    system without locks, two writers are not detected.
    """
    path = Path(f"{prefix}.lock")
    with path.open("wb") as file:
        if not _lock(path, file):
            raise ValueError(
                f"--output-prefix {prefix}: another process is writing it. Wait for that one, "
                "or choose another prefix."
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def naming_full_disks(prefix: str | Path) -> Iterator[None]:
    """Turn the error of a full disk into one that names the outputs and how to continue."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise RuntimeError(
            f"--output-prefix {prefix}: the disk takes no more ({error.strerror}). What is "
            "written stays: make room, and the same command goes on from there."
        ) from error


def refuse_finished(prefixes: Iterable[Path], work: str) -> None:
    """Raise ValueError if a finished pair exists that other work made.

    Args:
        prefixes: prefixes of the pairs to write.
        work: hash of everything that decides their bytes, as in their manifests.
    """
    for prefix in prefixes:
        if bin_path(prefix).is_file() and read_manifest(prefix).get("work") != work:
            raise ValueError(
                f"{bin_path(prefix)} exists, and other inputs or options made it, or "
                f"{manifest_path(prefix).name} is missing: choose another "
                "--output-prefix, or give --overwrite to replace it."
            )


def _lock(path: Path, file: BinaryIO) -> bool:
    """Lock a file; True if it is locked now, or if the file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    # The former holder may have removed the file after it was opened here; a lock on a removed
    # file protects nothing.
    return path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino
