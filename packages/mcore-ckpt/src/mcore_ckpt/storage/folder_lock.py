"""One writer at a time on a run folder, on a disk or in an object store."""

from pathlib import Path

from mcore_base.file_lock import SILENT_S, FileLock, Holder, LockHeldError
from mcore_base.stores import StorePath, as_path
from mcore_ckpt.errors import CheckpointError, write_error

LOCK = ".writer.lock"
"""Name of the lock file in a run folder."""


class FolderLock(FileLock):
    """The right to write to a run folder, as a context manager or by hand.

    A job that saves many times holds it from start to end; saves of the same process then
    find it held and go on.
    """

    def __init__(self, folder: str | Path, *, silent_s: float = SILENT_S) -> None:
        """Take nothing yet.

        Args:
            folder: the run folder; made if absent.
            silent_s: seconds without a sign of life after which a holder is dead.
        """
        super().__init__(as_path(folder) / LOCK, silent_s=silent_s)

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
            super().acquire()
        except LockHeldError as error:
            raise CheckpointError(f"{error}: end it, or save to another folder.") from error
        except OSError as error:
            raise write_error(self.path, error) from error

    def check(self) -> None:
        """Make sure that this process still holds the lock, before something is made final.

        Raises:
            CheckpointError: if it was taken over, or is gone.
        """
        try:
            super().check()
        except LockHeldError as error:
            raise CheckpointError(str(error)) from error

    def _create(self, content: str) -> bool:
        if not isinstance(self.path, StorePath):
            return super()._create(content)
        # Stores have no exclusive creation that all of them know: whoever's lock stands after
        # both have written holds it.
        if self.path.is_file():
            return False
        self.path.write_whole(content.encode())
        found = self._read()
        return found is not None and found[0] == Holder.parse(content)

    def _read(self) -> tuple[Holder, float] | None:
        if not isinstance(self.path, StorePath):
            return super()._read()
        try:
            return Holder.parse(self.path.read_text()), self.path.modified_s()
        except FileNotFoundError:
            return None

    def _touch(self) -> None:
        if isinstance(self.path, StorePath):
            self.path.write_whole(self.path.read_bytes())
        else:
            super()._touch()

    def _take_away(self, holder: Holder) -> None:
        if isinstance(self.path, StorePath):
            self.path.unlink(missing_ok=True)
        else:
            super()._take_away(holder)
