"""What a long job checks of its outputs before it starts.

That files can be written there, that no other process writes the same ones, and that nothing
finished is lost: a pair that another command made stays, unless it is to be replaced.
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
    """Make a folder for outputs, and try whether it takes files."""
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
    """Make the folder of a pair, and try it out; of ``corpus/`` that is the folder corpus."""
    make_folder(Path(os.path.dirname(output_prefix)), f"--output-prefix {output_prefix}")


@contextlib.contextmanager
def only_writer(prefix: str | Path) -> Iterator[None]:
    """Keep other processes from writing the same outputs meanwhile.

    The lock belongs to the process, not to its children, and is gone with it. Where the file
    system has no locks, nothing is kept.
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
    """Say which outputs a full disk has stopped, and how they go on."""
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
    """Refuse to replace finished pairs, but by the work that made them.

    Args:
        prefixes: of the pairs that are to be written.
        work: hash of all that decides their bytes, as manifests hold it.
    """
    for prefix in prefixes:
        if bin_path(prefix).is_file() and read_manifest(prefix).get("work") != work:
            raise ValueError(
                f"{bin_path(prefix)} exists, and other inputs or options made it "
                f"({manifest_path(prefix).name} would say these): choose another "
                "--output-prefix, or give --overwrite to replace it."
            )


def _lock(path: Path, file: BinaryIO) -> bool:
    """Lock a file; True if it is locked now, or this file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    # A lock file that its holder removed in between protects nothing.
    return path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino
