"""Checks the outputs of a command before a long job starts.

The folder must be writable, no other process may write the same files, and a finished pair of
another command is replaced only with ``--overwrite``.
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
    """Make a folder for outputs; raise ``ValueError`` if no file can be written to it."""
    if is_store(folder):
        return  # stores have no folders
    if "://" in flag:
        raise ValueError(
            f"{flag}: these outputs must be local files. Name a local path, and copy .bin and "
            ".idx to the store when they are complete."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{flag}: {folder} cannot be written ({error.strerror}). Name a path in a folder "
            "that can be written."
        ) from error


def make_parent_folder(output_prefix: str | Path) -> None:
    """Make the folder of a pair, as ``make_folder``; for ``corpus/`` this is ``corpus``."""
    make_folder(as_path(os.path.dirname(output_prefix)), f"--output-prefix {output_prefix}")


@contextlib.contextmanager
def only_writer(prefix: str | Path) -> Iterator[None]:
    """Hold the lock of the outputs; raise ``ValueError`` if another process holds it.

    The lock is visible to other hosts. It belongs to the process, not to its children.
    """
    try:
        with lock_at(as_path(f"{prefix}.lock")):
            yield
    except LockHeldError as error:
        raise ValueError(
            f"--output-prefix {prefix}: another process is writing it ({error}). Wait for this "
            "process, or choose another prefix."
        ) from error


@contextlib.contextmanager
def naming_full_disks(prefix: str | Path) -> Iterator[None]:
    """Replace the error of a full disk by one that names the outputs and how to continue."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise RuntimeError(
            f"--output-prefix {prefix}: the disk is full ({error.strerror}). The partial files "
            "are kept: free some space, and repeat the command to continue."
        ) from error


def refuse_finished(prefixes: Iterable[Path], work: str) -> None:
    """Raise ``ValueError`` if a finished pair exists that other inputs or options produced.

    Args:
        prefixes: prefixes of the pairs to write.
        work: hash of everything that determines the pairs' bytes, as in their manifests.
    """
    for prefix in prefixes:
        existing = [path for path in (bin_path(prefix), idx_path(prefix)) if path.is_file()]
        if existing and read_manifest(prefix).get("work") != work:
            raise ValueError(
                f"{existing[0]} exists and was written from other inputs or with other "
                f"options, or {manifest_path(prefix).name} is missing: choose another "
                "--output-prefix, or give --overwrite to replace it."
            )
