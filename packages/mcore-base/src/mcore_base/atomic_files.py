"""Atomic writes: a file appears complete or not at all, also after a kill or a power cut.

A file is written under another name in its folder, flushed to the disk and renamed; then the
folder is flushed. An object store writes an object in one step, which has the same effect.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mcore_base.stores import StorePath, is_store

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of writes beyond a disk's space, a quota or a file's size limit."""


def replace_file(
    path: Path, write: Callable[[BinaryIO], object], partial: Path | None = None
) -> None:
    """Write a file under another name, flush it, and rename it to ``path``.

    Args:
        path: final name on a disk; an existing file is replaced.
        write: writes the content.
        partial: temporary name in the same folder, which no other process may use now; the file
            stays after an error. None: a random name, removed after an error.
    """
    # Random, not host name and process number, which containers may share.
    temporary = partial or path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            write(file)
            sync_file(file)
        temporary.replace(path)
    finally:
        if partial is None:
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file or object atomically."""
    if isinstance(path, StorePath):
        path.write_whole(content)
    else:
        replace_file(path, lambda file: file.write(content))


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file or the files of a folder and flush the copies to the disk."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        for entry in sorted(source.iterdir()):
            copy_durably(entry, target / entry.name)
        sync_folder(target)
    elif is_store(source) or is_store(target):
        write_durably(target, source.read_bytes())
    else:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def sync_file(file: BinaryIO) -> None:
    """Flush a file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk; does nothing in a store."""
    if is_store(folder):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
