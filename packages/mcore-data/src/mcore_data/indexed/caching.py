"""Caches index arrays on disk under a hash of everything that determines them.

All processes of a job may call ``cached_arrays`` at the same time, also on a shared disk. Files
are renamed into place once they are complete, and all processes write the same bytes; the lock
only avoids building twice, so a file system without locks is safe too. No process waits for
another one in a collective, and the operating system releases the lock of a process that
crashed.
"""

import contextlib
import fcntl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_base.atomic_files import replace_file


def cached_arrays(
    folder: str | Path,
    key: str,
    names: Sequence[str],
    build: Callable[[], Sequence[NDArray[Any]]],
) -> list[NDArray[Any]]:
    """Map ``<folder>/<key>-<name>.npy`` for each name; build and write them if one is missing.

    Args:
        folder: folder of the cache, made if it does not exist; "" builds in memory and writes
            nothing.
        key: hash of everything that determines the arrays.
        names: names of the arrays, in the order in which ``build`` returns them.
        build: makes the arrays; must give the same bytes in every process.

    Raises:
        ValueError: if arrays are missing and the folder cannot be written.
        RuntimeError: if a file is empty, truncated or not an array.
    """
    if not folder:
        return list(build())
    paths = [Path(folder) / f"{key}-{name}.npy" for name in names]
    if not _complete(paths):
        _make(Path(folder))
        with _lock(Path(folder) / f".{key}.lock"):
            if not _complete(paths):  # else another process built them in the meantime
                for path, array in zip(paths, build(), strict=True):
                    replace_file(path, lambda file, array=array: np.save(file, array))
    return [map_array(path) for path in paths]


def map_array(path: Path) -> NDArray[Any]:
    """Map a ``.npy`` file.

    Raises:
        RuntimeError: if it is empty, truncated or no array.
    """
    try:
        return np.asarray(np.load(path, mmap_mode="r"))
    except (ValueError, EOFError, SyntaxError, TokenError) as error:
        raise RuntimeError(
            f"{path} is damaged ({error}): remove it to build it again."
        ) from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"--data-cache-path {folder} cannot be written ({error.strerror}): name a folder that "
        "can, or one in which mcore-data index has built the indices of this run."
    )


def _complete(paths: Sequence[Path]) -> bool:
    return all(path.is_file() for path in paths)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock on ``path`` if the file system has locks; remove the file afterwards."""
    try:
        file = path.open("wb")
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    with file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
