"""Checks of the outputs before a long job starts.

Files can be written to the folder, no other process writes the same files, and a finished pair
of another command is replaced only with ``--overwrite``.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from mcore_base.atomic_files import FULL_DISK
from mcore_base.file_lock import LockHeldError, lock_at
from mcore_base.stores import as_path, is_store
from mcore_data.indexed.index_format import bin_path, idx_path
from mcore_data.indexed.manifest import manifest_path, read_manifest


def make_folder(folder: Path, flag: str) -> None:
    """Make a folder for outputs; raises ValueError if no file can be written to it."""
    if is_store(folder):
        return  # stores have no folders
    if "://" in flag:
        raise ValueError(
            f"{flag}: these outputs are local files. Name a place on this machine, and copy "
            ".bin and .idx to the store once they are whole."
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
    make_folder(as_path(os.path.dirname(output_prefix)), f"--output-prefix {output_prefix}")


@contextlib.contextmanager
def only_writer(prefix: str | Path) -> Iterator[None]:
    """Hold the lock of the outputs; raises ValueError if another process holds it.

    Other hosts see the lock too. It belongs to the process, not to its children.
    """
    try:
        with lock_at(as_path(f"{prefix}.lock")):
            yield
    except LockHeldError as error:
        raise ValueError(
            f"--output-prefix {prefix}: another process is writing it ({error}). Wait for that "
            "one, or choose another prefix."
        ) from error


@contextlib.contextmanager
def naming_full_disks(prefix: str | Path) -> Iterator[None]:
    """Turn the error of a full disk into one that names the outputs and how to continue."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
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
        existing = [path for path in (bin_path(prefix), idx_path(prefix)) if path.is_file()]
        if existing and read_manifest(prefix).get("work") != work:
            raise ValueError(
                f"{existing[0]} exists, and other inputs or options made it, or "
                f"{manifest_path(prefix).name} is missing: choose another "
                "--output-prefix, or give --overwrite to replace it."
            )
