"""Object stores and other URLs through fsspec (extra ``remote``; ``s3`` for S3)."""

from collections.abc import Callable, Sequence
from typing import Any, BinaryIO


def find_remote(
    url: str, data_files: Callable[[Sequence[str]], list[str]], *, refresh: bool = False
) -> list[tuple[str, int, str]]:
    """URL, size and stamp of the files that a URL names: a file, a folder or a pattern.

    Args:
        url: with a scheme.
        data_files: picks those of a folder.
        refresh: list the store again instead of using this process's cache.

    Raises:
        ImportError: if fsspec or the store's own package is not installed.
    """
    store, path = _open_store(url)
    if refresh:
        store.invalidate_cache()
    if any(mark in path for mark in "*?["):
        paths = [name for name in store.glob(path) if store.isfile(name)]
    elif store.isdir(path):
        paths = data_files(store.ls(path, detail=False))
    else:
        paths = [path] if store.exists(path) else []
    found = []
    for name in sorted(paths):
        info = store.info(name)
        stamp = info.get("ETag") or info.get("mtime") or info.get("LastModified") or ""
        found.append((store.unstrip_protocol(name), int(info.get("size") or 0), str(stamp)))
    return found


def open_remote(url: str) -> BinaryIO:
    """Open a URL for reading in large pieces."""
    store, path = _open_store(url)
    return store.open(path, "rb")


def _open_store(url: str) -> tuple[Any, str]:
    extra = "s3" if url.startswith(("s3://", "s3a://")) else "remote"
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except ImportError as error:
        raise ImportError(
            f"{url} needs the extra: pip install 'mcore-data[{extra}]' ({error})."
        ) from error
