"""One writer at a time: a lock file that names its holder and is touched every few seconds.

Two containers may share host name and process number, and the clock of a file server may be
minutes off. So a random token identifies the holder, and the holder counts as dead once the
file has not changed for two minutes of the waiting process's monotonic clock. A holder in the
same kernel and process namespace is looked up by its process number instead, without waiting.
An flock would not do: not every shared file system shows it to other hosts.
"""

import contextlib
import errno
import glob
import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from mcore_base.stores import StorePath

log = logging.getLogger(__name__)

SILENT_S = 120.0
"""Time without a change of the lock file after which its holder counts as dead."""

BEAT_S = 15.0
"""Time between two touches of the lock file. NFS clients may see a touch a minute late."""

_POLL_S = 0.5
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


class LockHeldError(RuntimeError):
    """Another live process holds the lock, or took it over."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock, as its file describes it."""

    token: str = ""
    """Random, one for each process; holders are compared by their tokens only."""
    host: str = "an unknown host"
    pid: int = 0
    namespace: str = ""
    """Kernel start and process namespace, within which ``pid`` is one process; or empty."""
    started: str = ""
    """Start time of the process in the kernel's ticks, as process numbers are reused."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def current(cls) -> Self:
        """Describe this process."""
        pid = os.getpid()
        _, started = _process_state(pid)
        return cls(_token(pid), socket.gethostname(), pid, _namespace(), started)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a lock file; the fields of the holder are empty if the file is damaged."""
        try:
            fields = json.loads(text)
            return cls(**{name: fields[name] for name in asdict(cls()) if name in fields})
        except (ValueError, TypeError):
            return cls()

    def is_alive(self) -> bool | None:
        """Whether the holder runs; None if it is in another kernel or process namespace."""
        if not self.namespace or self.namespace != _namespace():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        state, started = _process_state(self.pid)
        return state not in ("Z", "X") and started in ("", self.started)


class FileLock:
    """A lock held by creating a file, as a context manager or by ``acquire`` and ``release``.

    Objects of one process share a lock that the process holds; the object that took the lock
    releases it.
    """

    def __init__(self, path: Path, *, silent_s: float = SILENT_S) -> None:
        """Prepare a lock; ``acquire`` takes it.

        Args:
            path: the lock file; its folder must exist when the lock is taken.
            silent_s: seconds without a change after which a holder is dead.
        """
        self.path = path
        self._silent_s = silent_s
        self._stop: threading.Event | None = None

    def acquire(self) -> None:
        """Take the lock, or share it if this process holds it already.

        Waits ``silent_s`` for a sign of life of a holder that this process cannot see.

        Raises:
            LockHeldError: if another process holds it and is alive.
            OSError: if the lock file cannot be written.
        """
        for _ in range(3):
            if self._create(json.dumps(asdict(Holder.current()))):
                self._stop = threading.Event()
                threading.Thread(target=self._beat, args=(self._stop,), daemon=True).start()
                self._remove_leftovers()
                return
            holder = self._dead_holder()
            if holder is None:
                continue
            if holder.token == Holder.current().token:
                return
            log.warning("taking over the lock of dead %s", holder)
            self._take_away(holder)
        raise LockHeldError(
            f"{self.path} changes its holder too often: is another job starting? Try again."
        )

    def check(self) -> None:
        """Check that this process still holds the lock, before an output is made final.

        Raises:
            LockHeldError: if the lock was taken over, or its file is gone.
        """
        current = self.read()
        if current is None or current[0].token != Holder.current().token:
            raise LockHeldError(
                f"the lock of {self.path.parent} was lost: "
                f"{'no process' if current is None else current[0]} holds it now. Was this "
                "process stopped for minutes?"
            )

    def release(self) -> None:
        """Remove the lock file, if this object took the lock."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
            current = self.read()
            if current is not None and current[0].token == Holder.current().token:
                self.path.unlink(missing_ok=True)

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

    def _create(self, content: str) -> bool:
        """Create the lock file; return False if it exists."""
        temporary = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        try:
            # A link appears whole or not at all, on NFS too.
            temporary.write_text(content)
            os.link(temporary, self.path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                with self.path.open("x") as file:
                    file.write(content)
            except FileExistsError:
                return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def read(self) -> tuple[Holder, float] | None:
        """Return the holder and the file's time of change, which only serves to see changes."""
        try:
            # On NFS, opening a file fetches its current attributes from the server.
            with self.path.open(errors="replace") as file:
                return Holder.parse(file.read()), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def _touch(self) -> None:
        """Update the lock file's time; FileNotFoundError if there is no lock file."""
        os.utime(self.path)

    def _take_away(self, holder: Holder) -> None:
        """Remove the lock file if ``holder``, which is dead, still holds the lock."""
        moved_path = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        try:
            self.path.rename(moved_path)
        except FileNotFoundError:
            return
        if Holder.parse(moved_path.read_text(errors="replace")) != holder:
            # Another process took the lock in between: put its file back.
            with contextlib.suppress(FileExistsError):
                os.link(moved_path, self.path)
        moved_path.unlink()

    def _remove_leftovers(self) -> None:
        """Remove temporary files of processes that were killed within ``acquire``."""
        for path in self.path.parent.glob(f"{glob.escape(self.path.name)}.*"):
            with contextlib.suppress(OSError):  # the process removed the file meanwhile
                if Holder.parse(path.read_text()).is_alive() is False:
                    path.unlink()

    def _dead_holder(self) -> Holder | None:
        """Return the holder once it is dead or this process; None if the lock is released.

        Waits up to ``silent_s``; raises LockHeldError if another live process holds the lock.
        """
        first = latest = self.read()
        started_s = time.monotonic()
        is_logged = False
        while latest is not None and first is not None:
            holder, is_alive = latest[0], latest[0].is_alive()
            is_dead = is_alive is False or time.monotonic() - started_s > self._silent_s
            if holder.token == Holder.current().token or (is_dead and not is_alive):
                return holder
            if is_alive or latest != first:
                raise LockHeldError(f"{holder} is writing to {self.path.parent}")
            if not is_logged:
                log.warning(
                    "%s holds %s, and this process cannot see whether it is alive: waiting up "
                    "to %.0f s for a sign of life",
                    *(holder, self.path, self._silent_s),
                )
                is_logged = True
            time.sleep(min(_POLL_S, self._silent_s / 4))
            latest = self.read()
        return None

    def _beat(self, stop: threading.Event) -> None:
        token = Holder.current().token
        while not stop.wait(BEAT_S):
            try:
                current = self.read()
                if current is None or current[0].token != token:
                    return
                self._touch()
            except OSError as error:  # The file server may be away for a moment: try again.
                log.warning("cannot touch %s: %s", self.path, error)


def lock_at(path: Path, silent_s: float = SILENT_S) -> FileLock:
    """Return the lock of a path on a disk or in an object store."""
    return (StoreLock if isinstance(path, StorePath) else FileLock)(path, silent_s=silent_s)


class StoreLock(FileLock):
    """A ``FileLock`` whose file is an object of an object store."""

    path: StorePath

    def _create(self, content: str) -> bool:
        # A conditional put, if the store supports one. Otherwise two processes may both see no
        # lock and write: the process whose content remains holds the lock.
        if self.path.is_file():
            return False
        try:
            self.path.system.pipe_file(self.path.key, content.encode(), mode="create")
        except OSError:  # stores raise different errors if the object exists
            if self.path.is_file():
                return False
            raise
        except (TypeError, NotImplementedError):
            self.path.write_whole(content.encode())
        current = self.read()
        return current is not None and current[0] == Holder.parse(content)

    def read(self) -> tuple[Holder, float] | None:
        """Return the holder and when its object was written."""
        try:
            return Holder.parse(self.path.read_text()), self.path.modified_s()
        except FileNotFoundError:
            return None

    def _touch(self) -> None:
        self.path.write_whole(self.path.read_bytes())

    def _take_away(self, holder: Holder) -> None:
        current = self.read()
        if current is not None and current[0] == holder:
            self.path.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Do nothing: ``_create`` writes no temporary objects."""


@cache
def _token(_pid: int) -> str:
    """Return this process's token, cached by number: a forked child gets another token."""
    return uuid.uuid4().hex


@cache
def _namespace() -> str:
    """Return the kernel start and process namespace of this process; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_state(pid: int) -> tuple[str, str]:
    """Return a process's state letter and start time; empty if they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    # The second field is a name in brackets, which may hold blanks and brackets.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
