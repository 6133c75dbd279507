"""Object stores through fsspec: file systems by URL, and ``s3://bucket/run`` as a ``Path``.

``open_store`` is the only place that imports fsspec. ``as_path`` turns a folder or URL that a
user names into a ``Path`` or a ``StorePath``. A store shows an object
once its writer has closed it, so objects need no flush and no rename. As on a disk, a folder is
complete once its index, the last file, is written.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/+(?P<rest>.*)")
_DISK = ("file", "local")


def open_store(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the key of the URL's object there.

    Raises:
        ImportError: with the extra to install, if fsspec or the store's package is missing.
        ValueError: if fsspec has no store of this scheme.
    """
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except ImportError as error:
        extra = "s3" if url.startswith(("s3://", "s3a://")) else "remote"
        raise ImportError(
            f"{url} needs a package: pip install 'mcore-base[{extra}]' ({error})."
        ) from error


def object_version(info: Mapping[str, Any]) -> str:
    """Return the fingerprint of an object's content, from fsspec's ``info``."""
    keys = ("ETag", "etag", "mtime", "LastModified")
    return str(next((info[key] for key in keys if info.get(key)), ""))


def as_path(where: str | Path) -> Path:
    """Return the path of a folder or file on a disk, or a ``StorePath`` for a URL.

    ``file:///run`` is ``/run`` on a disk.

    Raises:
        ValueError: if the store's package is missing or its scheme is unknown.
    """
    if isinstance(where, StorePath):
        return where
    match = _URL.fullmatch(str(where))
    if match is None:
        return Path(where)
    if match["scheme"] in _DISK:
        return Path("/", match["rest"])
    path = StorePath(f"{match['scheme']}:", match["rest"])
    try:
        path.system  # noqa: B018 - a missing package raises here, not in a thread
    except ImportError as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}: use a scheme such as s3 or gs.") from None
    return path


def is_store(path: Path) -> bool:
    """Whether a path lies in an object store."""
    return isinstance(path, StorePath)


class StorePath(PosixPath):
    """A name in an object store, with those methods of ``Path`` that checkpoints use."""

    __slots__ = ()

    @property
    def url(self) -> str:
        """The name with its scheme: ``s3://bucket/run``."""
        return f"{self.parts[0]}//{'/'.join(self.parts[1:])}"

    @property
    def system(self) -> Any:
        """The fsspec file system; fsspec keeps one for each kind of store."""
        return open_store(self.url)[0]

    @property
    def key(self) -> str:
        """The name within the store."""
        return open_store(self.url)[1]

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

    def list_sizes(self) -> dict[str, int]:
        """Return the sizes of all objects below this name, by name; bypasses fsspec's cache."""
        system = self.system
        system.invalidate_cache()
        start = len(self.key.rstrip("/")) + 1
        infos = system.find(self.key, detail=True) if system.isdir(self.key) else {}
        system.invalidate_cache()
        return {name[start:]: int(info["size"]) for name, info in infos.items()}

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
        """Open an object; ``xb`` writes like ``wb``, as callers use new names."""
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
