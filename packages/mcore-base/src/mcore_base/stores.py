"""Object stores behind the face of ``pathlib``: ``s3://bucket/run`` instead of a folder.

``as_path`` turns what a user names into a ``Path``, or for a URL into a ``StorePath``, whose
reads and writes go through fsspec. An object appears whole when its writer closes it, so
nothing is made durable by hand and nothing is renamed: a step's index, written last, is what
makes it exist, as on a disk.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/+(?P<rest>.*)")
_DISK = ("file", "local")


def as_path(where: str | Path) -> Path:
    """Return the path of a folder or file, on a disk or in an object store.

    ``file:///run`` is ``/run``: a disk, with all that disks can.
    """
    if isinstance(where, StorePath):
        return where
    found = _URL.fullmatch(str(where))
    if found is None:
        return Path(where)
    if found["scheme"] in _DISK:
        return Path("/", found["rest"])
    path = StorePath(f"{found['scheme']}:", found["rest"])
    try:
        path.system  # noqa: B018 - a missing package raises here, not in a thread
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{where}: {str(error).rstrip('.')}. For s3, install mcore-ckpt[s3]; for other "
            "stores, the package that fsspec names."
        ) from None
    return path


def is_store(path: Path) -> bool:
    """Whether a path lies in an object store."""
    return isinstance(path, StorePath)


class StorePath(PosixPath):
    """A name in an object store; the part of ``Path`` that checkpoints use."""

    __slots__ = ()

    @property
    def system(self) -> Any:
        """The fsspec file system; fsspec keeps one a kind of store."""
        import fsspec

        return fsspec.filesystem(self.parts[0].rstrip(":"))

    @property
    def key(self) -> str:
        """The name within the store."""
        return "/".join(self.parts[1:])

    def read_range(self, start: int, stop: int) -> bytes:
        """Read bytes ``start`` to ``stop`` of an object."""
        return self.system.cat_file(self.key, start=start, end=stop)

    def write_whole(self, content: bytes) -> None:
        """Write an object at once."""
        self.system.pipe_file(self.key, content)

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self.system.isfile(self.key)

    def is_dir(self) -> bool:
        """Whether there are objects below this name."""
        return self.system.isdir(self.key)

    def exists(self, **_options: Any) -> bool:
        """Whether there is an object of this name or below it."""
        return self.system.exists(self.key)

    def stat(self, **_options: Any) -> Any:
        """Return the size of an object as ``st_size``."""
        return SimpleNamespace(st_size=self.system.size(self.key))

    def modified_s(self) -> float:
        """Return when an object was written, in seconds since 1970."""
        return self.system.modified(self.key).timestamp()

    def read_bytes(self) -> bytes:
        """Read a whole object."""
        return self.system.cat_file(self.key)

    def read_text(self, *_arguments: Any, **_options: Any) -> str:
        """Read a whole object as text."""
        return self.read_bytes().decode()

    def open(self, mode: str = "r", *_arguments: Any, **_options: Any) -> Any:
        """Open an object; ``xb`` writes like ``wb``, for names are fresh."""
        return self.system.open(self.key, mode.replace("x", "w"))

    def mkdir(self, *_arguments: Any, **_options: Any) -> None:
        """Do nothing: stores have no folders."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete an object."""
        if missing_ok and not self.is_file():
            return
        self.system.rm_file(self.key)

    def delete_tree(self) -> None:
        """Delete every object below this name."""
        if self.exists():
            self.system.rm(self.key, recursive=True)

    def iterdir(self) -> Iterator["StorePath"]:
        """List the names right below this one."""
        for name in self.system.ls(self.key, detail=False):
            yield self / name.rstrip("/").rpartition("/")[2]

    def glob(self, pattern: str, **_options: Any) -> Iterator["StorePath"]:
        """List the names right below this one that match."""
        if self.is_dir():
            yield from (path for path in self.iterdir() if path.match(pattern))
