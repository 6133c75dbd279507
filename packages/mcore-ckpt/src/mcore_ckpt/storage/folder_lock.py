"""One writer at a time on a run folder, on a disk or in an object store."""

from pathlib import Path
from types import TracebackType
from typing import Self

from mcore_base.file_lock import SILENT_S, FileLock, LockHeldError, StoreLock
from mcore_base.stores import StorePath, as_path
from mcore_ckpt.errors import CheckpointError, write_error

LOCK = ".writer.lock"
"""Name of the lock file in a run folder."""


class FolderLock:
    """Exclusive right to write to a run folder; a context manager.

    A job that saves repeatedly holds the lock from start to end; saves of the same process
    share it meanwhile.
    """

    def __init__(self, folder: str | Path, *, silent_s: float = SILENT_S) -> None:
        """Prepare a lock; ``acquire`` takes it.

        Args:
            folder: the run folder; created if absent.
            silent_s: seconds without a heartbeat after which a holder counts as dead.
        """
        self.path = as_path(folder) / LOCK
        in_store = isinstance(self.path, StorePath)
        self._lock = (StoreLock if in_store else FileLock)(self.path, silent_s=silent_s)

    def acquire(self) -> None:
        """Take the lock, or share it if this process holds it already.

        Raises:
            CheckpointError: if another live process holds it, or the disk fails.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(self.path.parent, error) from error
        try:
            self._lock.acquire()
        except LockHeldError as error:
            raise CheckpointError(
                f"{error}: end that process, or save to another folder."
            ) from error
        except OSError as error:
            raise write_error(self.path, error) from error

    def check(self) -> None:
        """Check that this process still holds the lock, before a commit.

        Raises:
            CheckpointError: if another process took the lock over, or its file is gone.
        """
        try:
            self._lock.check()
        except LockHeldError as error:
            raise CheckpointError(str(error)) from error

    def release(self) -> None:
        """Release the lock if this object took it."""
        self._lock.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
