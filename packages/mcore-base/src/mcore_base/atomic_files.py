"""Files that appear whole or not at all, and JSON files that prove to be unchanged.

A file is written under another name, flushed to the disk and renamed; then its folder is
flushed, so that neither a kill nor a loss of power leaves an empty or a partial file under
the final name. The JSON files carry a digest of themselves.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

DIGEST = "sha256"
"""Key under which a JSON file holds the digest of all its other keys; its last."""


def replace_file(path: Path, write: Callable[[BinaryIO], object], partial: Path) -> None:
    """Write a file under the name ``partial``, then rename it to ``path``.

    Args:
        path: final name; a file of this name is replaced.
        write: fills the file.
        partial: name in the same folder that no other process uses now.
    """
    with partial.open("wb") as file:
        write(file)
        sync_file(file)
    partial.replace(path)
    sync_folder(path.parent)


def sync_file(file: BinaryIO) -> None:
    """Flush a file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names of a folder's files to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a JSON file that carries a digest of itself; only one process may at a time."""
    replace_file(path, lambda file: file.write(_render(facts)), Path(f"{path}.partial"))


def parse_json(data: bytes) -> dict[str, Any] | None:
    """Parse a file of ``replace_json``; None if any of its bytes changed.

    The whole text is rendered again and compared, so that white space, the order of keys and
    keys that occur twice count too.
    """
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and _render(facts) == data else None


def _render(facts: Mapping[str, Any]) -> bytes:
    """Text of a JSON file, the digest added or renewed."""
    rest = {name: value for name, value in facts.items() if name != DIGEST}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**rest, DIGEST: digest}, indent=2) + "\n").encode()
