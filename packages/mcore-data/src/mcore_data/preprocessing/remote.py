"""Inputs in object stores and at other URLs (extra ``remote``; ``s3`` for S3)."""

from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import BinaryIO

from mcore_base.stores import object_version, open_store


def find_remote(
    url: str,
    choose: Callable[[Sequence[str]], list[str]] = list,
    *,
    refresh: bool = False,
) -> tuple[list[tuple[str, int, str]], list[str]]:
    """Find the files of a URL: one file, all files below a folder, or a pattern's matches.

    Args:
        url: with a scheme.
        choose: selects the inputs among the files below a folder, by relative names.
        refresh: list the store again instead of using this process's cache.

    Returns:
        URL, size and stamp of each input, by name; URLs of the files that were left out.

    Raises:
        ImportError: if fsspec or the store's own package is not installed.
    """
    store, path = open_store(url)
    if refresh:
        store.invalidate_cache()
    left_out: list[str] = []
    if any(mark in path for mark in "*?["):
        infos = store.glob(path, detail=True)
        chosen = [name for name in infos if infos[name]["type"] == "file"]
        folders = [name for name in infos if infos[name]["type"] != "file"]
        left_out = without_parents(folders, chosen)
    elif store.isdir(path):
        infos = store.find(path, detail=True)
        start = len(path.rstrip("/")) + 1
        names = choose([name[start:] for name in sorted(infos)])
        chosen = [f"{path.rstrip('/')}/{name}" for name in names]
        left_out = sorted(infos.keys() - set(chosen))
    else:
        infos = {path: store.info(path)} if store.exists(path) else {}
        chosen = list(infos)
    inputs = []
    for name in sorted(chosen):
        info = infos[name]
        size = int(info.get("size") or 0)
        inputs.append((store.unstrip_protocol(name), size, object_version(info)))
    return inputs, [store.unstrip_protocol(name) for name in left_out]


def without_parents(folders: Sequence[str], files: Sequence[str]) -> list[str]:
    """Return the folders that contain none of the files, at any depth."""
    parents = {str(parent) for file in files for parent in PurePosixPath(file).parents}
    return [folder for folder in folders if folder.rstrip("/") not in parents]


def open_remote(url: str) -> BinaryIO:
    """Open a URL for reading in large pieces."""
    store, path = open_store(url)
    return store.open(path, "rb")
